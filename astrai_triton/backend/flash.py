"""The optional flash-attn backend (package ``flash_attn``, version 2.6 or later)."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import ClassVar

import torch

from astrai_triton.backend.base import ATTN_BACKEND, AttentionBackend, AttentionCall
from astrai_triton.backend.dense import first_visible
from astrai_triton.backend.flash_plan import FlashPlan
from astrai_triton.backend.slots import PlanCache

_MAX_HEAD_DIM = 256


class FlashAttnBackend(AttentionBackend):
    """flash_attn over keys gathered through ``req_to_token``.

    Its own paging wants blocks of 256 tokens, not single slots. A prefill asks the device once per step
    whether the table has masked tokens, since flash_attn cannot mask them there. Decode reads nothing back.
    The package is imported when the backend is first considered.

    Args:
        may_read: whether the plan of a step may look at index values; None is on a CPU only.
    """

    name: ClassVar[ATTN_BACKEND] = ATTN_BACKEND.FLASH

    def __init__(self, may_read: bool | None = None) -> None:
        self._plans = PlanCache(FlashPlan, may_read)
        self._module: ModuleType | None = None
        self._import_error: str | None = None

    def unavailable(self) -> str | None:
        """Why flash_attn cannot be imported; None when it can."""
        if self._module is None and self._import_error is None:
            try:
                self._module = importlib.import_module("flash_attn")
            except (ImportError, OSError) as error:
                self._import_error = (
                    f"the package flash_attn cannot be imported ({error}); pip install flash-attn"
                )
        return self._import_error

    def why_not(self, call: AttentionCall) -> str | None:
        """As ``AttentionBackend.why_not``."""
        head_dim, value_dim = call.q.shape[-1], call.v.shape[-1]
        if call.q.device.type != "cuda":
            return f"flash_attn needs CUDA tensors, got {call.q.device}"
        if call.q.dtype not in (torch.float16, torch.bfloat16):
            return f"flash_attn needs float16 or bfloat16, got {call.q.dtype}"
        if head_dim > _MAX_HEAD_DIM or head_dim % 8:
            return f"flash_attn needs a head_dim up to {_MAX_HEAD_DIM} in steps of 8, got {head_dim}"
        if value_dim != head_dim:
            return f"flash_attn needs v with the head_dim of k, {head_dim}, got {value_dim}"
        if call.attn_mask is not None:
            return "flash_attn takes no attn_mask"
        if call.sinks is not None:
            return "flash_attn takes no sinks"
        if (
            call.fwd == "prefill"
            and self._plans.plan(call.cache).prefill_reads(call.window_size[0]).has_holes
        ):
            return "flash_attn cannot mask single tokens in prefill, and req_to_token has negative slots"
        return None

    def fwd_dense(self, call: AttentionCall) -> torch.Tensor:
        """As ``AttentionBackend.fwd_dense``."""
        first = first_visible(call.q.shape[1], call.k.shape[1], call.window_size)
        k, v = call.k[:, first:], call.v[:, first:]
        if call.q.numel() == 0 or k.numel() == 0:
            return torch.zeros_like(call.q)
        out: torch.Tensor = self._loaded().flash_attn_func(
            call.q,
            k,
            v,
            softmax_scale=call.softmax_scale,
            causal=call.is_causal,
            window_size=call.window_size,
            softcap=call.softcap,
        )
        return out

    def fwd_decode(self, call: AttentionCall) -> torch.Tensor:
        """As ``AttentionBackend.fwd_decode``. The order of keys does not matter here: masked ones go last."""
        plan = self._plans.plan(call.cache)
        k_layer, v_layer = call.store(plan.writes)
        reads = plan.decode_reads(call.window_size[0])
        if call.q.numel() == 0 or reads.width == 0:
            return torch.zeros_like(call.q)
        shape = (call.q.shape[0], reads.width)
        out: torch.Tensor = self._loaded().flash_attn_with_kvcache(
            call.q[:, None],
            k_layer.index_select(0, reads.slots).view(*shape, *k_layer.shape[1:]),
            v_layer.index_select(0, reads.slots).view(*shape, *v_layer.shape[1:]),
            cache_seqlens=reads.counts,
            softmax_scale=call.softmax_scale,
            causal=False,
            softcap=call.softcap,
        )
        return out[:, 0].masked_fill((reads.counts == 0)[:, None, None], 0)

    def fwd_prefill(self, call: AttentionCall) -> torch.Tensor:
        """As ``AttentionBackend.fwd_prefill``."""
        plan = self._plans.plan(call.cache)
        k_layer, v_layer = call.store(plan.writes)
        keys = plan.prefill_reads(call.window_size[0])
        if call.q.numel() == 0 or keys.longest == 0:
            return torch.zeros_like(call.q)
        out: torch.Tensor = self._loaded().flash_attn_varlen_func(
            call.q,
            k_layer.index_select(0, keys.slots),
            v_layer.index_select(0, keys.slots),
            cu_seqlens_q=call.cache.qo_indptr,
            cu_seqlens_k=keys.indptr,
            max_seqlen_q=max(call.cache.q_lens),
            max_seqlen_k=keys.longest,
            softmax_scale=call.softmax_scale,
            causal=call.is_causal,
            window_size=call.window_size,
            softcap=call.softcap,
        )
        return out

    def _loaded(self) -> ModuleType:
        reason = self.unavailable()
        if self._module is None:
            raise ImportError(reason)
        return self._module
