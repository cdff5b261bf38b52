"""What the engine asks of a model."""

from __future__ import annotations

from typing import Protocol

import torch

from astrai_triton.kvcache import KVCache
from astrai_triton.model import ModelConfig


class Model(Protocol):
    """A decoder over packed rows and a KV cache."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        logits_rows: torch.Tensor,
    ) -> torch.Tensor:
        """``token_ids [T]``, ``positions [T]``, ``logits_rows [R]`` int64 -> logits ``[R, vocab]``
        float32."""
        ...


def check_replacement(old: Model, new: Model, *, is_captured: bool) -> None:
    """Refuse a model that steps cannot go on with.

    Args:
        old: what the tasks began with.
        new: what they shall go on with.
        is_captured: whether decode steps of ``old`` were captured.

    Raises:
        ValueError: config, dtype or device differ, or there are captured steps.
    """
    if is_captured:
        raise ValueError(
            "model: the decode steps of the old one were captured; make the engine with cuda_graphs=False"
        )
    for name in ("config", "dtype", "device"):
        wanted, got = getattr(old, name), getattr(new, name)
        if wanted != got:
            raise ValueError(f"model: wanted the {name} of the old one, {wanted}, got {got}")
