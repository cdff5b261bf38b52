"""The torch backend: runs everything everywhere, over keys gathered from the cache."""

from __future__ import annotations

from typing import ClassVar

import torch

from astrai_triton.backend.base import ATTN_BACKEND, AttentionBackend, AttentionCall
from astrai_triton.backend.dense import attend, attend_dense
from astrai_triton.backend.plan import Reads, StepPlan
from astrai_triton.backend.slots import PlanCache


class TorchNativeBackend(AttentionBackend):
    """scaled_dot_product_attention, over slots gathered through ``req_to_token`` where there is a cache.

    Decode is one batched call whatever the number of requests and reads nothing back from a device. Its bits
    do not depend on batch mates; how torch and BLAS block a prefill is theirs, so there that holds to
    rounding.

    Args:
        may_read: whether the plan of a step may look at index values; None is on a CPU only, where it is
            free.
    """

    name: ClassVar[ATTN_BACKEND] = ATTN_BACKEND.TORCH_NATIVE

    def __init__(self, may_read: bool | None = None) -> None:
        self._plans = PlanCache(StepPlan, may_read)

    def why_not(self, call: AttentionCall) -> str | None:
        """None: every checked call runs."""
        return None

    def fwd_dense(self, call: AttentionCall) -> torch.Tensor:
        """As ``AttentionBackend.fwd_dense``."""
        return attend_dense(
            call.q,
            call.k,
            call.v,
            attn_mask=call.attn_mask,
            is_causal=call.is_causal,
            softmax_scale=call.softmax_scale,
            window_size=call.window_size,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def fwd_decode(self, call: AttentionCall) -> torch.Tensor:
        """As ``AttentionBackend.fwd_decode``."""
        plan = self._plans.plan(call.cache)
        k_layer, v_layer = call.store(plan.writes)
        reads = plan.decode_reads(call.window_size[0], call.attn_mask)
        return _attend_reads(call, reads, call.q.unsqueeze(1), k_layer, v_layer).squeeze(1)

    def fwd_prefill(self, call: AttentionCall) -> torch.Tensor:
        """As ``AttentionBackend.fwd_prefill``."""
        plan = self._plans.plan(call.cache)
        k_layer, v_layer = call.store(plan.writes)
        q, outs = call.q, []
        for reads in plan.prefill_reads(call.is_causal, call.window_size, call.attn_mask):
            num_rows = reads.batch * reads.q_len
            rows = q[reads.first_row : reads.first_row + num_rows].view(
                reads.batch, reads.q_len, *q.shape[1:]
            )
            outs.append(_attend_reads(call, reads, rows, k_layer, v_layer).flatten(0, 1))
        if len(outs) == 1:
            return outs[0]
        return torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], call.v.shape[-1])


def _attend_reads(
    call: AttentionCall, reads: Reads, q: torch.Tensor, k_layer: torch.Tensor, v_layer: torch.Tensor
) -> torch.Tensor:
    """q ``[batch, q_len, Hq, D]`` over the gathered keys -> ``[batch, q_len, Hq, Dv]``."""
    keys, values = reads.gather(k_layer, v_layer)
    return attend(q, keys, values, reads.visible, call.softmax_scale, call.softcap, call.sinks)
