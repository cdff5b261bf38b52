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
