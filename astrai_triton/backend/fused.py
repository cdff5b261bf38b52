"""The Triton backend: attention straight over the pool, compiled on a GPU or interpreted on a CPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from types import ModuleType
from typing import ClassVar

import torch

from astrai_triton.backend.base import ATTN_BACKEND, AttentionCall
from astrai_triton.backend.op_calls import OpsBackend
from astrai_triton.kvcache import KVCache

_MIN_CAPABILITY = (8, 0)
_INTERPRET = "set TRITON_INTERPRET=1 before the start to interpret the kernels on the CPU, slowly"


class TritonBackend(OpsBackend):
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
    subject = "the Triton kernels"

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
        reason = self._why_not_shape(call)
        if reason is not None:
            return reason
        q = call.q
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

    def _import_ops(self) -> ModuleType:
        # Importing Triton takes long, and a process that never comes here does not need it.
        return importlib.import_module("astrai_triton.ops")

    def _decode_scratch(self, cache: KVCache) -> dict[str, torch.Tensor | None]:
        return {"o_part": cache.decode_o_part, "ml_part": cache.decode_ml_part}


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
