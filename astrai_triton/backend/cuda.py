"""The backend of the reference kernels in ``cuda_ref``: on a GPU, or checked on a CPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import ClassVar

from astrai_triton.backend.base import ATTN_BACKEND, AttentionCall
from astrai_triton.backend.op_calls import OpsBackend

# Where tensors are -> the build that runs them.
_KINDS = {"cuda": "cuda", "cpu": "host"}


class CudaBackend(OpsBackend):
    """The ops of ``cuda_ref``: to check other backends against, kernel by kernel or a whole model.

    It runs where it is asked for and is no part of the automatic order. The first call builds the kernels,
    which takes a minute or more; later processes find them built. On a CPU every thread of a GPU is
    simulated, slowly, and what a GPU would not forgive is an error. Decode allocates its scratch when it
    needs some, as that of the cache is cut for the Triton kernels; its result lives in
    ``kv_cache.decode_out``.

    Args:
        may_read: whether writing a prefill's K and V may look at slots; None is on a CPU only.
    """

    name: ClassVar[ATTN_BACKEND] = ATTN_BACKEND.CUDA
    subject = "the kernels of cuda_ref"

    def unavailable(self) -> str | None:
        """Why neither build can be had here; builds nothing."""
        reasons = [_why_not_kind(kind) for kind in _KINDS.values()]
        return None if None in reasons else "; ".join(dict.fromkeys(filter(None, reasons)))

    def why_not(self, call: AttentionCall) -> str | None:
        """As ``AttentionBackend.why_not``."""
        kind = _KINDS.get(call.q.device.type)
        if kind is None:
            return f"cuda_ref needs CUDA or CPU tensors, got {call.q.device}"
        reason = _why_not_kind(kind)
        if reason is not None:
            return reason
        return self._why_not_shape(call)

    def _import_ops(self) -> ModuleType:
        # The kernels are another package, which a process that never comes here does not need.
        return importlib.import_module("cuda_ref.ops")


@functools.cache
def _why_not_kind(kind: str) -> str | None:
    """Why a build of ``cuda_ref`` cannot be had; asked by every call, so looked up once a process."""
    if importlib.util.find_spec("cuda_ref") is None:
        return "the package cuda_ref is not installed"
    reason: str | None = importlib.import_module("cuda_ref").why_not(kind)
    return reason
