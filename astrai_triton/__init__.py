"""Attention for LLM inference: Triton kernels as plain functions, and one policy entry point over
interchangeable backends, dense or over a paged KV cache.

This module is the embeddable surface. The kernels' functions (``attn_paged_decode`` and so on) load Triton
when they are first named. The serving engine is ``astrai_triton.engine``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from astrai_triton.backend import (
    ATTN_BACKEND,
    AttentionBackend,
    CudaBackend,
    FlashAttnBackend,
    TorchNativeBackend,
    TritonBackend,
    apply_rotary_emb,
    attention,
    attn_backend,
)
from astrai_triton.errors import (
    AdmissionError,
    AstraiError,
    BackendError,
    CacheError,
    ChatTemplateError,
    CheckpointError,
    ContextLengthError,
    CorruptFileError,
    EngineUnavailableError,
    FetchError,
    GrammarError,
    NonFiniteLogitsError,
    OutOfPagesError,
    PageOwnershipError,
    PoolTooSmallError,
    QueueFullError,
    TaskError,
    TokenizerError,
    TraceError,
    UnknownBackendError,
    UnknownModelError,
    UnsupportedCallError,
    UnsupportedModelError,
    WeightsMismatchError,
)
from astrai_triton.kvcache import KVCache

if TYPE_CHECKING:
    from astrai_triton.ops.library import (
        attn_decode,
        attn_paged_decode,
        attn_paged_prefill,
        attn_prefill,
        merge_states,
        rotary_append_,
        rotary_emb,
        rotary_qk_,
    )

__version__ = "0.1.0"

__all__ = [
    "ATTN_BACKEND",
    "AdmissionError",
    "AstraiError",
    "AttentionBackend",
    "BackendError",
    "CacheError",
    "ChatTemplateError",
    "CheckpointError",
    "ContextLengthError",
    "CorruptFileError",
    "CudaBackend",
    "EngineUnavailableError",
    "FetchError",
    "FlashAttnBackend",
    "GrammarError",
    "KVCache",
    "NonFiniteLogitsError",
    "OutOfPagesError",
    "PageOwnershipError",
    "PoolTooSmallError",
    "QueueFullError",
    "TaskError",
    "TokenizerError",
    "TorchNativeBackend",
    "TraceError",
    "TritonBackend",
    "UnknownBackendError",
    "UnknownModelError",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "WeightsMismatchError",
    "__version__",
    "apply_rotary_emb",
    "attention",
    "attn_backend",
    "attn_decode",
    "attn_paged_decode",
    "attn_paged_prefill",
    "attn_prefill",
    "merge_states",
    "rotary_append_",
    "rotary_emb",
    "rotary_qk_",
]


def __getattr__(name: str) -> Any:
    # Only the kernels' functions are not here yet: importing Triton takes longer than all the rest together.
    if name in __all__:
        return getattr(importlib.import_module("astrai_triton.ops.library"), name)
    raise AttributeError(f"module 'astrai_triton' has no attribute {name!r}")
