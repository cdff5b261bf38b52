"""A backend made of attention ops: which op runs which call. The Triton ops, or those of the reference."""

from __future__ import annotations

import abc
import functools
from types import ModuleType
from typing import Any, ClassVar

import torch

from astrai_triton.backend.base import AttentionBackend, AttentionCall
from astrai_triton.backend.slots import PlanCache, SlotTable, Writes
from astrai_triton.kvcache import KVCache

_HEAD_DIMS = range(16, 257, 8)
_SINK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class OpsBackend(AttentionBackend):
    """Runs calls by the functions of a package like ``astrai_triton.ops``, imported by the first one.

    Args:
        may_read: whether writing a prefill's K and V may look at slots; None is on a CPU only.
    """

    subject: ClassVar[str]
    """What messages call the kernels."""

    def __init__(self, may_read: bool | None = None) -> None:
        self._writes = PlanCache(_plan_writes, may_read)

    @abc.abstractmethod
    def _import_ops(self) -> ModuleType:
        """The package of the ops."""

    def _decode_scratch(self, cache: KVCache) -> dict[str, torch.Tensor | None]:
        """Scratch of the cache that the decode op can work in."""
        return {}

    def _why_not_shape(self, call: AttentionCall) -> str | None:
        """Why no ops can run such a call, wherever its tensors are."""
        q, value_dim = call.q, call.v.shape[-1]
        if q.shape[-1] not in _HEAD_DIMS or value_dim not in _HEAD_DIMS:
            got = q.shape[-1] if q.shape[-1] not in _HEAD_DIMS else value_dim
            return f"{self.subject} need a head_dim of 16 to 256 in steps of 8, got {got}"
        if (
            call.fwd == "dense"
            and torch.is_grad_enabled()
            and (q.requires_grad or call.k.requires_grad or call.v.requires_grad)
        ):
            return (
                f"{self.subject} have no backward; use torch.no_grad() or the backend torch_native for "
                "tensors that require gradients"
            )
        if call.sinks is not None and call.sinks.dtype not in _SINK_DTYPES:
            return f"{self.subject} take sinks in float16, bfloat16 or float32, got {call.sinks.dtype}"
        return None

    def fwd_dense(self, call: AttentionCall) -> torch.Tensor:
        """As ``AttentionBackend.fwd_dense``, without gradients."""
        mask = call.attn_mask
        if call.q.shape[1] != 1:
            return _returned(
                self._ops.attn_prefill(
                    call.q, call.k, call.v, mask=mask, is_causal=call.is_causal, **_options(call)
                )
            )
        if mask is not None and mask.dim() == 3:
            mask = mask[:, 0]
        # The one row is the last position: causality hides nothing from it.
        return _returned(self._ops.attn_decode(call.q, call.k, call.v, mask=mask, **_options(call)))

    def fwd_decode(self, call: AttentionCall) -> torch.Tensor:
        """As ``AttentionBackend.fwd_decode``; the result is ``kv_cache.decode_out``."""
        cache = call.cache
        return _returned(
            self._ops.attn_paged_decode(
                call.q,
                *call.layer,
                cache.req_to_token,
                cache.req_pool_indices,
                cache.kv_indptr,
                new_k=None if call.is_stored else call.k,
                new_v=None if call.is_stored else call.v,
                mask=call.attn_mask,
                out=cache.decode_out,
                **self._decode_scratch(cache),
                max_kv_len=cache.max_len,
                **_options(call),
            )
        )

    def fwd_prefill(self, call: AttentionCall) -> torch.Tensor:
        """As ``AttentionBackend.fwd_prefill``."""
        cache = call.cache
        # What is stored needs no slots to be planned for torch.
        k_layer, v_layer = call.layer if call.is_stored else call.store(self._writes.plan(cache))
        return _returned(
            self._ops.attn_paged_prefill(
                call.q,
                k_layer,
                v_layer,
                cache.req_to_token,
                cache.req_pool_indices,
                cache.kv_indptr,
                cache.qo_indptr,
                cache.q_tile_to_batch,
                cache.q_tile_to_index,
                mask=call.attn_mask,
                is_causal=call.is_causal,
                max_kv_len=cache.max_len,
                **_options(call),
            )
        )

    @functools.cached_property
    def _ops(self) -> ModuleType:
        return self._import_ops()


def _plan_writes(cache: KVCache, may_read: bool) -> Writes:
    return SlotTable(cache, may_read).plan_writes(cache.out_cache_loc)


def _options(call: AttentionCall) -> dict[str, Any]:
    return {
        "softmax_scale": call.softmax_scale,
        "window_size": call.window_size,
        "softcap": call.softcap,
        "sinks": call.sinks,
    }


def _returned(out: Any) -> torch.Tensor:
    assert isinstance(out, torch.Tensor)
    return out
