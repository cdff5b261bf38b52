"""One call of an entry point: which build runs it, its arguments, and the memory that it may touch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from cuda_ref.build import BuildError, build
from cuda_ref.toolchain import KINDS, Kind, why_not

_DTYPE_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def check_available(device: torch.device) -> None:
    """A build runs tensors of that device; raises RuntimeError with the reason, and builds nothing."""
    _check_kind(find_kind(device))


def find_kind(device: torch.device) -> Kind:
    """The build that runs tensors of a device.

    Raises:
        RuntimeError: no build does.
    """
    kinds: dict[str, Kind] = {"cpu": "host", "cuda": "cuda"}
    kind = kinds.get(device.type)
    if kind is None:
        raise RuntimeError(f"device: wanted cpu or cuda, got {device.type}; move the tensors to one of them")
    return kind


@functools.cache
def _check_kind(kind: Kind) -> None:
    # Exceptions are not cached, so that what was missing may be installed.
    reason = why_not(kind)
    if reason is not None:
        raise BuildError(reason)


@functools.cache
def load_extension(kind: Kind) -> ModuleType:
    """The build of that kind. Hashing the sources takes longer than a call, so it is done once a process."""
    assert kind in KINDS
    return build(kind)


class Call:
    """The arguments of one call, as a struct of the extension and as ranges of memory.

    Args:
        struct: name of the struct, such as "AttnParams".
        device: where the tensors are; it says which build is called.
    """

    def __init__(self, struct: str, device: torch.device) -> None:
        self._device = device
        self.extension = load_extension(find_kind(device))
        self.params: Any = getattr(self.extension, struct)()
        # Held until the launch: what a caller passes may be a temporary.
        self._tensors: list[tuple[torch.Tensor, bool]] = []

    def add(
        self,
        name: str,
        tensor: torch.Tensor | None,
        *strides: str,
        first_axis: int = 0,
        is_writable: bool = False,
    ) -> None:
        """Pass a tensor: its address as the field ``name``, strides of leading dimensions as further fields.

        Args:
            name: field of the address.
            tensor: None leaves all of the fields as they are.
            strides: fields of the strides of the dimensions from ``first_axis`` on, in order.
            first_axis: the dimension that the first of ``strides`` belongs to.
            is_writable: whether the kernel may write to it.
        """
        if tensor is None:
            return
        setattr(self.params, name, tensor.data_ptr())
        for axis, field in enumerate(strides, start=first_axis):
            # A dimension of size 1 has no say: its stride may be anything, and would spoil the alignment.
            setattr(self.params, field, tensor.stride(axis) if tensor.shape[axis] > 1 else 0)
        self._tensors.append((tensor, is_writable))

    def set(self, **fields: float) -> None:
        """Set plain fields."""
        for name, value in fields.items():
            setattr(self.params, name, value)

    def dtype(self, dtype: torch.dtype) -> Any:
        """A dtype as the extension spells it."""
        return getattr(self.extension.Dtype, _DTYPE_NAMES[dtype])

    def run(self, entry: str, dtype: torch.dtype, kind: Any) -> None:
        """Call an entry point on the tensors' device and torch's current stream.

        Raises:
            RuntimeError: the launch failed, or on the host a kernel broke a rule.
            ValueError: the variant has no kernel for the call.
        """
        # On a GPU nothing looks at them.
        checked = self._tensors if self.extension.is_host else []
        ranges = [(tensor.data_ptr(), count_bytes(tensor), writable) for tensor, writable in checked]
        with _on_device(self._device) as stream:
            getattr(self.extension, entry)(self.params, self.dtype(dtype), kind, stream, ranges)


def count_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a view to the end of its last; 0 if it has none."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@contextlib.contextmanager
def _on_device(device: torch.device) -> Iterator[int]:
    """Make a device current, and give the handle of its current stream."""
    if device.type != "cuda":
        yield 0
        return
    with torch.cuda.device(device):
        yield torch.cuda.current_stream().cuda_stream
