"""The Triton backend: attention straight over the pool, compiled on a GPU or interpreted on a CPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any, ClassVar

import torch

from astrai_triton.backend.base import ATTN_BACKEND, AttentionBackend, AttentionCall
from astrai_triton.backend.slots import PlanCache, SlotTable, Writes
from astrai_triton.kvcache import KVCache

_MIN_CAPABILITY = (8, 0)
_HEAD_DIMS = range(16, 257, 8)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INTERPRET = "set TRITON_INTERPRET=1 before the start to interpret the kernels on the CPU, slowly"


class TritonBackend(AttentionBackend):
    """The kernels of ``astrai_triton.ops``: K and V are read where they lie, slot by slot, never gathered.

    Decode appends the new K and V in the kernel and works in the scratch of the KVCache; its result lives in
    ``kv_cache.decode_out`` and is overwritten by the next decode call over the same workspace. Nothing is
    read back from a device, so decode may be captured in a CUDA graph.

    On a GPU the first choice. On a CPU the kernels run in Triton's interpreter, for checking, and only where
    they are asked for. Triton and the kernels are imported by the first call.

    Args:
        may_read: whether writing a prefill's K and V may look at slots; None is on a CPU only.
    """

    name: ClassVar[ATTN_BACKEND] = ATTN_BACKEND.TRITON

    def __init__(self, may_read: bool | None = None) -> None:
        self._writes = PlanCache(_plan_writes, may_read)

    def unavailable(self) -> str | None:
        """Why no kernel can run here: Triton is missing, or there is neither a GPU nor the interpreter."""
        if not _has_triton():
            return "the package triton is not installed; pip install triton"
        if is_interpreted():
            return None
        if not torch.cuda.is_available():
            return f"Triton needs a CUDA device, and there is none; {_INTERPRET}"
        return None

    def why_not(self, call: AttentionCall) -> str | None:
        """As ``AttentionBackend.why_not``."""
        q, value_dim = call.q, call.v.shape[-1]
        if q.shape[-1] not in _HEAD_DIMS or value_dim not in _HEAD_DIMS:
            got = q.shape[-1] if q.shape[-1] not in _HEAD_DIMS else value_dim
            return f"the Triton kernels need a head_dim of 16 to 256 in steps of 8, got {got}"
        if (
            call.fwd == "dense"
            and torch.is_grad_enabled()
            and (q.requires_grad or call.k.requires_grad or call.v.requires_grad)
        ):
            return (
                "the Triton kernels have no backward; use torch.no_grad() or the backend torch_native "
                "for tensors that require gradients"
            )
        if call.sinks is not None and call.sinks.dtype not in _DTYPES:
            return f"the Triton kernels take sinks in float16, bfloat16 or float32, got {call.sinks.dtype}"
        if is_interpreted():
            runs = q.device.type in ("cpu", "cuda")
            return None if runs else f"Triton's interpreter needs CPU or CUDA tensors, got {q.device}"
        if q.device.type != "cuda":
            return f"the Triton kernels need CUDA tensors, got {q.device}; {_INTERPRET}"
        return _why_not_device(q.device)

    def why_not_automatic(self, call: AttentionCall) -> str | None:
        """The interpreter is thousands of times slower than torch: it runs only for those who ask."""
        if call.q.device.type == "cuda":
            return None
        return "on a CPU the Triton kernels run in the interpreter, and only when asked for"

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
                o_part=cache.decode_o_part,
                ml_part=cache.decode_ml_part,
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
        # Importing Triton takes long, and a process that never comes here does not need it.
        return importlib.import_module("astrai_triton.ops")


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter; settled when they are imported."""
    launch = sys.modules.get("astrai_triton.ops.launch")
    return os.environ.get("TRITON_INTERPRET") == "1" if launch is None else bool(launch.IS_INTERPRETED)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _why_not_device(device: torch.device) -> str | None:
    """Why a CUDA device cannot run the kernels."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return (
            f"the Triton kernels need compute capability {_MIN_CAPABILITY[0]}.{_MIN_CAPABILITY[1]} or later, "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )
    return None


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
