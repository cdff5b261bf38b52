"""Attention and rotary policy: which implementation runs a call, and the implementations."""

from __future__ import annotations

from astrai_triton.backend.attention import attention
from astrai_triton.backend.base import ATTN_BACKEND, AttentionBackend, AttentionCall
from astrai_triton.backend.cuda import CudaBackend
from astrai_triton.backend.flash import FlashAttnBackend
from astrai_triton.backend.fused import TritonBackend
from astrai_triton.backend.native import TorchNativeBackend
from astrai_triton.backend.rotary import apply_rotary_emb
from astrai_triton.backend.selection import attn_backend, backend_reasons, current_backend

__all__ = [
    "ATTN_BACKEND",
    "AttentionBackend",
    "AttentionCall",
    "CudaBackend",
    "FlashAttnBackend",
    "TorchNativeBackend",
    "TritonBackend",
    "apply_rotary_emb",
    "attention",
    "attn_backend",
    "backend_reasons",
    "current_backend",
]
