"""Measure llama.cpp: ``python bench/peers/run_llama_cpp.py``.

Its sources come with the package llama-cpp-python. Library and ``llama-server`` are built from them once, for
this machine; the package's bindings then use that library. Tokens are chosen with NumPy, which is faster than
the library's own greedy sampler. Flash attention, continuous batching and packed weights are its defaults.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environment import Environment, SetupError
from frame import Peer, Setup, main

_VERSION = "0.3.36"
_BATCH = 2048
"""Tokens of one call, the library's default."""

_BUILD_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    # The page would be fetched from a network.
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)

_LOAD_TILES = "_tile_loadconfig(&tc);"
_MEND = '__asm__ volatile("" : : "r"(&tc) : "memory");'


def build(environment: Environment) -> None:
    """Fetch the sources, build ``llama-server`` with its libraries, install the bindings without building."""
    sources = environment.directory / "sources"
    sources.mkdir(exist_ok=True)
    download = (
        environment.python, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python",
        "--dest", sources, f"llama-cpp-python=={_VERSION}",
    )  # fmt: skip
    environment.run(*download)
    archive = sources / f"llama_cpp_python-{_VERSION}.tar.gz"
    with tarfile.open(archive) as tar:
        tar.extractall(sources, filter="data")
    source = sources / f"llama_cpp_python-{_VERSION}" / "vendor" / "llama.cpp"
    keep_tile_shapes(source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    built = environment.directory / "build"
    environment.run("cmake", "-S", source, "-B", built, "-G", "Ninja", *_BUILD_OPTIONS)
    jobs = str(len(os.sched_getaffinity(0)))
    environment.run("nice", "-n", "19", "cmake", "--build", built, "--target", "llama-server", "-j", jobs)
    environment.install("--no-deps", str(archive), env={"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"})


def keep_tile_shapes(path: Path) -> None:
    """Mend its AMX kernels for GCC, which leaves out the stores of the tiles' shapes.

    Nothing seems to read them. Quantised weights would end in an illegal instruction.

    Raises:
        SetupError: the file is not as it was; the mend may not be needed any more.
    """
    text = path.read_text(encoding="utf-8")
    if _MEND in text:
        return
    if text.count(_LOAD_TILES) != 1:
        raise SetupError(f"{path}: wanted one {_LOAD_TILES!r} to mend, got {text.count(_LOAD_TILES)}")
    path.write_text(text.replace(_LOAD_TILES, f"{_MEND}\n    {_LOAD_TILES}"), encoding="utf-8")


class LlamaCppEngine:
    """``llama_decode`` on batches of sequences."""

    def __init__(self, setup: Setup) -> None:
        import llama_cpp
        import numpy as np

        self._np = np
        self._lib: Any = llama_cpp
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(setup.files[setup.variant].encode(), params)
        if not model:
            raise RuntimeError(f"{setup.files[setup.variant]} cannot be loaded")
        options = llama_cpp.llama_context_default_params()
        sizes = setup.sizes
        num_sequences = max(sizes.batch, 1)
        options.n_ctx = num_sequences * (-(-sizes.context // 256) * 256)
        options.n_seq_max = num_sequences
        options.n_batch = _BATCH
        options.n_threads = options.n_threads_batch = setup.threads
        self._context = llama_cpp.llama_init_from_model(model, options)
        if not self._context:
            raise RuntimeError(f"no context of {options.n_ctx} tokens")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """See ``workloads.Engine``."""
        lib = self._lib
        lib.llama_memory_clear(lib.llama_get_memory(self._context), False)
        rows = [
            (sequence, position, token, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        answers: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(rows), _BATCH):
            self._decode(rows[start : start + _BATCH], answers)
        for _ in range(max_tokens - 1):
            last = [
                (sequence, len(prompt) + len(answer) - 1, answer[-1], True)
                for sequence, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]
            self._decode(last, answers)
        return answers

    def _decode(self, rows: list[tuple[int, int, int, bool]], answers: list[list[int]]) -> None:
        """Run (sequence, position, token, is wanted) rows; append the likeliest token of each wanted one."""
        lib, batch = self._lib, self._batch
        batch.n_tokens = len(rows)
        for idx, (sequence, position, token, is_wanted) in enumerate(rows):
            batch.token[idx], batch.pos[idx], batch.logits[idx] = token, position, is_wanted
            batch.n_seq_id[idx], batch.seq_id[idx][0] = 1, sequence
        status = lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode: status {status}")
        for idx, (sequence, _, _, is_wanted) in enumerate(rows):
            if is_wanted:
                logits = lib.llama_get_logits_ith(self._context, idx)
                row = self._np.ctypeslib.as_array(logits, shape=(self._vocab_size,))
                answers[sequence].append(int(row.argmax()))


def set_variables(home: Path, setup: Setup) -> Mapping[str, str | None]:
    """Where the bindings find the library."""
    library = home / "llama_cpp" / "build" / "bin"
    return {"LLAMA_CPP_LIB_PATH": str(library), "LD_LIBRARY_PATH": str(library)}


def serve(setup: Setup, port: int) -> list[str]:
    """``llama-server`` with a slot for each client, and no cache of prompts, none of which comes twice."""
    slots = max(setup.sizes.clients, 1)
    server = Path(os.environ["LLAMA_CPP_LIB_PATH"]) / "llama-server"
    flags = {
        "--model": setup.files[setup.variant],
        "--port": port,
        "--parallel": slots,
        "--ctx-size": slots * setup.sizes.context,
        "--threads": setup.threads,
        "--cache-ram": 0,
        # Of its chain of samplers all but the likeliest token would be work for nothing.
        "--samplers": "top_k",
        "--top-k": 1,
    }
    return [str(server), "--no-cache-prompt", *(str(part) for flag in flags.items() for part in flag)]


PEER = Peer(
    name="llama_cpp",
    variants=("bf16", "q8_0", "source"),
    start=LlamaCppEngine,
    serve=serve,
    packages=("llama_cpp_python", "numpy"),
    requirements=(
        "cmake==4.1.2",
        "ninja==1.13.0",
        "numpy==2.4.6",
        "typing-extensions==4.16.0",
        "diskcache==5.6.3",
        "jinja2==3.1.6",
    ),
    step=build,
    variables=set_variables,
)

if __name__ == "__main__":
    main(PEER)
