"""What an attention backend is, and the one description of a call that all of them read."""

from __future__ import annotations

import abc
import enum
from typing import ClassVar, Literal

import attrs
import torch

from astrai_triton.backend.slots import Writes
from astrai_triton.kvcache import KVCache

Forward = Literal["decode", "prefill", "dense"]


class ATTN_BACKEND(enum.Enum):  # noqa: N801, the name is part of the interface
    """Names of the attention backends; the values are what ``ASTR_BACKEND`` takes."""

    TRITON = "triton"
    CUDA = "cuda"
    FLASH = "flash"
    TORCH_NATIVE = "torch_native"


def derive_forward(cache: KVCache) -> Forward:
    """``decode`` where every request has one row, else ``prefill``."""
    return "decode" if cache.q_lens.count(1) == len(cache.q_lens) else "prefill"


@attrs.frozen(eq=False)
class AttentionCall:
    """One call of ``attention()``, its arguments already checked.

    ``dense``: q ``[B, Lq, Hq, D]``, k ``[B, L, Hkv, D]``, v ``[B, L, Hkv, Dv]``, no ``kv_cache``.
    ``prefill`` and ``decode``: q ``[T, Hq, D]``, k ``[T, Hkv, D]``, v ``[T, Hkv, Dv]`` packed as ``kv_cache``
    says; k and v are new and, unless ``is_stored``, not yet in the cache. In ``decode`` every request has one
    row.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_cache: KVCache | None
    layer_id: int
    attn_mask: torch.Tensor | None
    """bool, True = keep; dense ``[B, L]`` or ``[B, Lq, L]``, packed ``[sum of q_len * kv_len]``."""
    is_causal: bool
    """Bottom-right aligned: row i of Lq sees keys up to L - Lq + i."""
    fwd: Forward
    softmax_scale: float | None
    """None is 1/sqrt(D)."""
    window_size: tuple[int, int]
    """A row at position p sees keys p - left to p + right, both inclusive; -1 is unbounded."""
    softcap: float
    """0 is off; otherwise scores become softcap * tanh(scores / softcap)."""
    sinks: torch.Tensor | None
    """``[Hq]``; one extra logit per q head in the softmax denominator, without a value."""
    is_stored: bool = False
    """The cache holds K and V of the new rows already: k and v are neither read nor written."""

    @property
    def cache(self) -> KVCache:
        """The KV cache of a packed call."""
        assert self.kv_cache is not None
        return self.kv_cache

    @property
    def layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[size, Hkv, D]`` of this layer of the cache."""
        return self.cache.k_buffer[self.layer_id], self.cache.v_buffer[self.layer_id]

    def store(self, writes: Writes) -> tuple[torch.Tensor, torch.Tensor]:
        """Write k and v at ``out_cache_loc``, unless ``is_stored``; returns ``layer``."""
        k_layer, v_layer = self.layer
        if not self.is_stored:
            writes.store(k_layer, self.k)
            writes.store(v_layer, self.v)
        return k_layer, v_layer


class AttentionBackend(abc.ABC):
    """One implementation of attention, with its own way of reading and writing the KV cache."""

    name: ClassVar[ATTN_BACKEND]

    def unavailable(self) -> str | None:
        """Why this backend cannot run anything on this machine; None when it can."""
        return None

    @abc.abstractmethod
    def why_not(self, call: AttentionCall) -> str | None:
        """Why this backend cannot run ``call``; None when it can. Only asked where it is available."""

    def why_not_automatic(self, call: AttentionCall) -> str | None:
        """Why the automatic order passes over this backend for a ``call`` it can run; None: it does not."""
        return None

    @abc.abstractmethod
    def fwd_decode(self, call: AttentionCall) -> torch.Tensor:
        """Store k, v unless ``is_stored``, and attend with one row per request: ``[B, Hq, Dv]``."""

    @abc.abstractmethod
    def fwd_prefill(self, call: AttentionCall) -> torch.Tensor:
        """Store k, v unless ``is_stored``, and attend with ragged rows: ``[T, Hq, Dv]``."""

    @abc.abstractmethod
    def fwd_dense(self, call: AttentionCall) -> torch.Tensor:
        """Attend without a cache, differentiably: ``[B, Lq, Hq, Dv]``."""

    def forward(self, call: AttentionCall) -> torch.Tensor:
        """Run ``call`` by its ``fwd``."""
        if call.fwd == "decode":
            return self.fwd_decode(call)
        if call.fwd == "prefill":
            return self.fwd_prefill(call)
        return self.fwd_dense(call)
