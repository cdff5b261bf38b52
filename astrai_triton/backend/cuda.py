"""The backend of the reference kernels in ``cuda_ref``: on a GPU, or checked on a CPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any, ClassVar

import torch

from astrai_triton.backend.base import ATTN_BACKEND, AttentionBackend, AttentionCall
from astrai_triton.backend.slots import PlanCache, SlotTable, Writes
from astrai_triton.kvcache import KVCache

_HEAD_DIMS = range(16, 257, 8)
_SINK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Where tensors are -> the build that runs them.
_KINDS = {"cuda": "cuda", "cpu": "host"}


class CudaBackend(AttentionBackend):
    """The ops of ``cuda_ref``: to check other backends against, kernel by kernel or a whole model.

    It runs where it is asked for and is no part of the automatic order. The first call builds the kernels,
    which takes a minute or more; later processes find them built. On a CPU every thread of a GPU is
    simulated, slowly, and what a GPU would not forgive is an error. Decode allocates its scratch when it
    needs some, and its result lives in ``kv_cache.decode_out``.

    Args:
        may_read: whether writing a prefill's K and V may look at slots; None is on a CPU only.
    """

    name: ClassVar[ATTN_BACKEND] = ATTN_BACKEND.CUDA

    def __init__(self, may_read: bool | None = None) -> None:
        self._writes = PlanCache(_plan_writes, may_read)

    def unavailable(self) -> str | None:
        """Why neither build can be had here; builds nothing."""
        reasons = [_why_not_kind(kind) for kind in _KINDS.values()]
        return None if None in reasons else "; ".join(dict.fromkeys(filter(None, reasons)))

    def why_not(self, call: AttentionCall) -> str | None:
        """As ``AttentionBackend.why_not``."""
        q, value_dim = call.q, call.v.shape[-1]
        kind = _KINDS.get(q.device.type)
        if kind is None:
            return f"cuda_ref needs CUDA or CPU tensors, got {q.device}"
        reason = _why_not_kind(kind)
        if reason is not None:
            return reason
        if q.shape[-1] not in _HEAD_DIMS or value_dim not in _HEAD_DIMS:
            got = q.shape[-1] if q.shape[-1] not in _HEAD_DIMS else value_dim
            return f"cuda_ref needs a head_dim of 16 to 256 in steps of 8, got {got}"
        if (
            call.fwd == "dense"
            and torch.is_grad_enabled()
            and (q.requires_grad or call.k.requires_grad or call.v.requires_grad)
        ):
            return (
                "cuda_ref has no backward; use torch.no_grad() or the backend torch_native for tensors that "
                "require gradients"
            )
        if call.sinks is not None and call.sinks.dtype not in _SINK_DTYPES:
            return f"cuda_ref takes sinks in float16, bfloat16 or float32, got {call.sinks.dtype}"
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
                # Not the scratch of the cache: it is cut for the splits of the Triton kernels.
                out=cache.decode_out,
                max_kv_len=cache.max_len,
                **_options(call),
            )
        )

    def fwd_prefill(self, call: AttentionCall) -> torch.Tensor:
        """As ``AttentionBackend.fwd_prefill``."""
        cache = call.cache
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
        # The kernels are another package, which a process that never comes here does not need.
        return importlib.import_module("cuda_ref.ops")


@functools.cache
def _why_not_kind(kind: str) -> str | None:
    """Why a build of ``cuda_ref`` cannot be had; asked by every call, so looked up once a process."""
    if importlib.util.find_spec("cuda_ref") is None:
        return "the package cuda_ref is not installed"
    reason: str | None = importlib.import_module("cuda_ref").why_not(kind)
    return reason


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
