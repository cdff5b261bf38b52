"""Which backend runs a call: an explicit context beats ``ASTR_BACKEND`` beats the automatic order.

An explicit choice is strict: if it cannot run the call, that is an error with the reason. Only the automatic
order goes on to the next backend.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType

from astrai_triton.backend.base import ATTN_BACKEND, AttentionBackend, AttentionCall
from astrai_triton.backend.cuda import CudaBackend
from astrai_triton.backend.flash import FlashAttnBackend
from astrai_triton.backend.fused import TritonBackend
from astrai_triton.backend.native import TorchNativeBackend
from astrai_triton.errors import UnknownBackendError, UnsupportedCallError

ENVIRONMENT_VARIABLE = "ASTR_BACKEND"

_BACKENDS: Mapping[ATTN_BACKEND, AttentionBackend] = MappingProxyType(
    {
        backend.name: backend
        for backend in (TritonBackend(), CudaBackend(), FlashAttnBackend(), TorchNativeBackend())
    }
)
_AUTOMATIC = tuple(
    _BACKENDS[kind] for kind in (ATTN_BACKEND.TRITON, ATTN_BACKEND.FLASH, ATTN_BACKEND.TORCH_NATIVE)
)
_BY_NAME: Mapping[str, ATTN_BACKEND] = MappingProxyType({backend.value: backend for backend in ATTN_BACKEND})

_chosen: ContextVar[ATTN_BACKEND | None] = ContextVar("astrai_attn_backend", default=None)


def parse_backend(backend: ATTN_BACKEND | str, source: str = "backend") -> ATTN_BACKEND:
    """The enum member of that name.

    Args:
        backend: a member, or its value such as ``"torch_native"``.
        source: what to call the argument in the error.

    Raises:
        UnknownBackendError: no backend has that name.
    """
    if isinstance(backend, ATTN_BACKEND):
        return backend
    known = _BY_NAME.get(backend)
    if known is None:
        raise UnknownBackendError(f"{source}: wanted one of {', '.join(_BY_NAME)}, got {backend!r}")
    return known


def attn_backend(backend: ATTN_BACKEND | str) -> contextlib.AbstractContextManager[ATTN_BACKEND]:
    """Context in which every ``attention()`` of this thread or task runs on ``backend``, strictly.

    Context variables do not follow work into another thread: capture ``current_backend()`` and re-enter
    there.

    Args:
        backend: a member of ``ATTN_BACKEND`` or its name.

    Raises:
        UnknownBackendError: at once, before the context is entered.
    """
    return _hold(parse_backend(backend))


@contextlib.contextmanager
def _hold(backend: ATTN_BACKEND) -> Iterator[ATTN_BACKEND]:
    token = _chosen.set(backend)
    try:
        yield backend
    finally:
        _chosen.reset(token)


def current_backend() -> ATTN_BACKEND | None:
    """The explicit choice in force here: context, else ``ASTR_BACKEND``; None is the automatic order.

    Raises:
        UnknownBackendError: ``ASTR_BACKEND`` names no backend.
    """
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    name = os.environ.get(ENVIRONMENT_VARIABLE)
    return parse_backend(name, ENVIRONMENT_VARIABLE) if name else None


def backend_reasons() -> dict[str, str | None]:
    """Every backend by name, with the reason it cannot run on this machine; None when it can."""
    return {kind.value: _BACKENDS[kind].unavailable() for kind in ATTN_BACKEND}


def select(call: AttentionCall) -> AttentionBackend:
    """The backend that runs ``call``.

    Raises:
        UnknownBackendError: ``ASTR_BACKEND`` names no backend.
        UnsupportedCallError: the explicit choice cannot run the call, or in automatic order none can.
    """
    chosen = current_backend()
    if chosen is None:
        return _first_able(call)
    backend = _BACKENDS[chosen]
    reason = backend.unavailable() or backend.why_not(call)
    if reason is not None:
        raise UnsupportedCallError(chosen.value, reason)
    return backend


def _first_able(call: AttentionCall) -> AttentionBackend:
    refusals = []
    for backend in _AUTOMATIC:
        reason = backend.unavailable() or backend.why_not(call) or backend.why_not_automatic(call)
        if reason is None:
            return backend
        refusals.append(f"{backend.name.value}: {reason}")
    raise UnsupportedCallError("automatic", "; ".join(refusals))
