"""Measure astrai-triton itself: ``python bench/peers/run_astrai.py``, in its own environment."""

from __future__ import annotations

import sys
from typing import Any

from frame import Peer, Setup, main

_SLOTS = 16


class AstraiEngine:
    """``InferenceEngine`` on the Hugging Face directory."""

    def __init__(self, setup: Setup) -> None:
        import torch

        from astrai_triton.checkpoint import open_checkpoint
        from astrai_triton.engine import InferenceEngine
        from astrai_triton.model import Decoder

        torch.set_num_threads(setup.threads)
        checkpoint = open_checkpoint(setup.files["hf"])
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[setup.variant]
        model = Decoder(checkpoint.config, dtype=dtype, device="cpu")
        model.load_weights(checkpoint.tensors())
        slots = max(_SLOTS, setup.sizes.batch)
        num_tokens = -(-setup.sizes.context // 16) * 16 * slots
        self._engine = InferenceEngine(model, checkpoint.tokenizer, max_batch_size=slots, n_tokens=num_tokens)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """See ``workloads.Engine``."""
        from astrai_triton.engine import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        handles = self._engine.submit_many(prompts, params)
        return [_read_ids(handle) for handle in handles]


def _read_ids(handle: Any) -> list[int]:
    return [event.token_id for event in handle.iter_events() if event.token_id is not None]


def serve(setup: Setup, port: int) -> list[str]:
    """``astrai serve``."""
    dtype = {"bf16": "bfloat16", "f32": "float32"}[setup.variant]
    flags = ["--port", str(port), "--dtype", dtype, "--threads", str(setup.threads)]
    command = [sys.executable, "-c", "from astrai_server.cli import main; main()"]
    return [*command, "serve", setup.files["hf"], *flags]


PEER = Peer(
    name="astrai",
    variants=("bf16", "f32"),
    start=AstraiEngine,
    serve=serve,
    packages=("astrai-triton", "torch"),
    is_own=True,
)

if __name__ == "__main__":
    main(PEER)
