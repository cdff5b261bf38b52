"""Measure astrai-triton itself: ``python bench/peers/run_astrai.py``, in its own environment.

The model is loaded as ``astrai serve`` and ``astrai generate`` load it.
"""

from __future__ import annotations

import sys
from typing import Any

from frame import Peer, Setup, main

_SLOTS = 16
_SETTINGS = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "f32": {"dtype": "float32"},
}


class _Log:
    """What the loading says, for the log."""

    def say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")

    def progress(self, phase: str, done: int, total: int) -> None:
        """Nobody watches."""


class AstraiEngine:
    """The engine of the command line, in this process."""

    def __init__(self, setup: Setup) -> None:
        from astrai_server.loading import load_engine
        from astrai_server.settings import ServerSettings, Settings

        server: Any = {
            **_SETTINGS[setup.variant],
            "param_path": setup.files["hf"],
            "threads": setup.threads,
            "max_batch_size": max(_SLOTS, setup.sizes.batch),
        }
        self._engine = load_engine(Settings(server=ServerSettings(**server)), _Log(), missing="build")

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """See ``workloads.Engine``."""
        from astrai_triton.engine import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        handles = self._engine.submit_many(prompts, params)
        return [_read_ids(handle) for handle in handles]


def _read_ids(handle: Any) -> list[int]:
    return [event.token_id for event in handle.iter_events() if event.token_id is not None]


def build_kernels(setup: Setup) -> None:
    """What ``astrai warmup`` does: build the CPU kernels, where they are not built yet."""
    AstraiEngine(setup).generate([[1, 2, 3]], 2)


def serve(setup: Setup, port: int) -> list[str]:
    """``astrai serve``."""
    settings = {**_SETTINGS[setup.variant], "port": port, "threads": setup.threads}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-c", "from astrai_server.cli import main; main()"]
    return [*command, "serve", setup.files["hf"], *flags]


PEER = Peer(
    name="astrai",
    variants=("bf16", "int8", "f32"),
    prepare=build_kernels,
    start=AstraiEngine,
    serve=serve,
    packages=("astrai-triton", "torch"),
    is_own=True,
)

if __name__ == "__main__":
    main(PEER)
