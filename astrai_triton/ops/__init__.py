"""Attention and rotary on tensors: check, choose, launch, return. No fallback, no policy, no sync."""

from __future__ import annotations

from astrai_triton.ops.decode import attn_decode, attn_paged_decode, merge_states
from astrai_triton.ops.prefill import attn_paged_prefill, attn_prefill
from astrai_triton.ops.rotary import rotary_append_, rotary_emb, rotary_qk_

__all__ = [
    "attn_decode",
    "attn_paged_decode",
    "attn_paged_prefill",
    "attn_prefill",
    "merge_states",
    "rotary_append_",
    "rotary_emb",
    "rotary_qk_",
]
