"""Attention for LLM inference: one policy entry point over interchangeable backends, dense or over a paged KV
cache.

This module is the embeddable surface. The serving engine is ``astrai_triton.engine``.
"""

from __future__ import annotations

from astrai_triton.backend import (
    ATTN_BACKEND,
    AttentionBackend,
    FlashAttnBackend,
    TorchNativeBackend,
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
    NonFiniteLogitsError,
    OutOfPagesError,
    PageOwnershipError,
    PoolTooSmallError,
    QueueFullError,
    TaskError,
    TokenizerError,
    UnknownBackendError,
    UnknownModelError,
    UnsupportedCallError,
    UnsupportedModelError,
    WeightsMismatchError,
)
from astrai_triton.kvcache import KVCache

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
    "EngineUnavailableError",
    "FetchError",
    "FlashAttnBackend",
    "KVCache",
    "NonFiniteLogitsError",
    "OutOfPagesError",
    "PageOwnershipError",
    "PoolTooSmallError",
    "QueueFullError",
    "TaskError",
    "TokenizerError",
    "TorchNativeBackend",
    "UnknownBackendError",
    "UnknownModelError",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "WeightsMismatchError",
    "__version__",
    "apply_rotary_emb",
    "attention",
    "attn_backend",
]
