"""Runs tests of the kernels on a GPU as they are: their CPU tensors go there, and every effect comes back.

Whole storages are carried, so that strides, offsets, shared memory and whatever lies around a view (poison
included) are there as they were here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

# Tests that forbid a function to allocate take torch.empty away; the journey is not meant.
_EMPTY = torch.empty


def carry(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``function``, with CPU tensors among its arguments replaced by their like on ``device``.

    What it writes to them is written here too, also if it raises. A result that is one of its arguments is
    that argument, any other is copied to the CPU.
    """

    @functools.wraps(function)
    def carried(*args: Any, **options: Any) -> Any:
        trip = _Trip(device)
        try:
            result = function(
                *(trip.send(value) for value in args),
                **{name: trip.send(value) for name, value in options.items()},
            )
        finally:
            trip.write_back()
        return trip.fetch(result)

    return carried


def carry_all(package: ModuleType, names: Iterable[str], device: torch.device) -> None:
    """Put the carried function in place of each of ``names``, in ``package`` and in its loaded modules."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package.__name__}.")]
    for name in names:
        function = getattr(package, name)
        carried = carry(function, device)
        for module in (package, *modules):
            if getattr(module, name, None) is function:
                setattr(module, name, carried)


class _Trip:
    """The tensors of one call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Address -> all bytes of a storage, here and there."""
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each argument, here and there."""

    def send(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        for here, there in self._tensors:
            if here is value:
                return there
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._storages:
            all_here = _EMPTY(0, dtype=torch.uint8).set_(storage)
            self._storages[storage.data_ptr()] = (all_here, all_here.to(self._device, copy=True))
        _, all_there = self._storages[storage.data_ptr()]
        there = _EMPTY(0, dtype=value.dtype, device=self._device).set_(
            all_there.untyped_storage(), value.storage_offset(), value.size(), value.stride()
        )
        there.requires_grad_(value.requires_grad)
        self._tensors.append((value, there))
        return there

    def write_back(self) -> None:
        for all_here, all_there in self._storages.values():
            all_here.copy_(all_there)

    def fetch(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(self.fetch(part) for part in result)
        for here, there in self._tensors:
            if there is result:
                return here
        return result.cpu() if isinstance(result, torch.Tensor) else result
