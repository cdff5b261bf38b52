"""What sampling on a CPU does with every logit of a row, in the kernels where they are built."""

from __future__ import annotations

import ctypes
import functools
import threading
from ctypes import c_float, c_int64, c_void_p
from typing import Protocol

import numpy as np
import numpy.typing as npt

from astrai_triton.cpu.build import build, is_built
from astrai_triton.errors import BackendError

Floats = npt.NDArray[np.float32]
Masses = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

MASS_BLOCK = 256
"""Neighbours whose masses are summed up."""


_MASS_ONE = 2.0**32


class RowOps(Protocol):
    """What sampling does with every logit of a row. For any thread.

    Rows are contiguous, without NaN and +inf. Mass is the exponential of a score, times 2^32, rounded to a
    whole number; the score of a logit is its distance from the largest one times ``scale``.
    """

    def weigh(self, logits: Floats, top: float, scale: float) -> Masses:
        """Mass of each of the logits [n], of which none is above ``top``."""

    def sum_mass(self, row: Floats, top: float, scale: float) -> Masses:
        """Sums of mass over ``MASS_BLOCK`` neighbours of row [V], [ceil(V / MASS_BLOCK)]."""

    def find_large(self, row: Floats, bound: float) -> Ids:
        """Indices [n] of what reaches ``bound`` in a row, ascending."""


class NumpyRowOps:
    """They with numpy, for where nothing is built."""

    def __init__(self) -> None:
        self._scratch = threading.local()

    def weigh(self, logits: Floats, top: float, scale: float) -> Masses:
        """As ``RowOps``."""
        mass = np.empty_like(logits)
        self._weigh_into(logits, top, scale, mass)
        return mass.astype(np.float64)

    def sum_mass(self, row: Floats, top: float, scale: float) -> Masses:
        """As ``RowOps``."""
        num_blocks = -(-len(row) // MASS_BLOCK)
        held: tuple[Floats, Masses] | None = getattr(self._scratch, "held", None)
        if held is None or len(held[0]) != len(row):
            held = np.empty(len(row), np.float32), np.zeros(num_blocks * MASS_BLOCK)
            self._scratch.held = held
        mass, wide = held
        self._weigh_into(row, top, scale, mass)
        np.copyto(wide[: len(row)], mass)
        # Whole numbers: exact in any order.
        sums: Masses = np.einsum("ij->i", wide.reshape(num_blocks, MASS_BLOCK))
        return sums

    def find_large(self, row: Floats, bound: float) -> Ids:
        """As ``RowOps``."""
        return np.flatnonzero(row >= np.float32(bound))

    def _weigh_into(self, logits: Floats, top: float, scale: float, mass: Floats) -> None:
        with np.errstate(all="ignore"):
            np.subtract(logits, np.float32(top), out=mass)
            if scale != 1.0:
                np.multiply(mass, np.float32(scale), out=mass)
            np.exp(mass, out=mass)
            np.multiply(mass, np.float32(_MASS_ONE), out=mass)
            np.rint(mass, out=mass)


NUMPY = NumpyRowOps()


class RowKernels:
    """They in the functions of ``csrc/sample.cpp``.

    Args:
        library: of ``build``.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._weigh, self._sum, self._find = (
            library.astrai_weigh,
            library.astrai_sum_mass,
            library.astrai_find_large,
        )
        for function in (self._weigh, self._sum):
            function.restype = None
            function.argtypes = [c_void_p, c_int64, c_float, c_float, c_void_p]
        self._find.restype = c_int64
        self._find.argtypes = [c_void_p, c_int64, c_float, c_void_p]
        self._scratch = threading.local()

    def weigh(self, logits: Floats, top: float, scale: float) -> Masses:
        """As ``RowOps``."""
        mass = np.empty_like(logits)
        self._weigh(logits.ctypes.data, len(logits), top, scale, mass.ctypes.data)
        return mass.astype(np.float64)

    def sum_mass(self, row: Floats, top: float, scale: float) -> Masses:
        """As ``RowOps``."""
        sums = np.empty(-(-len(row) // MASS_BLOCK))
        self._sum(row.ctypes.data, len(row), top, scale, sums.ctypes.data)
        return sums

    def find_large(self, row: Floats, bound: float) -> Ids:
        """As ``RowOps``."""
        ids: Ids | None = getattr(self._scratch, "ids", None)
        if ids is None or len(ids) < len(row):
            ids = self._scratch.ids = np.empty(len(row), np.int64)
        num = self._find(row.ctypes.data, len(row), bound, ids.ctypes.data)
        return ids[:num].copy()


@functools.cache
def find_row_kernels() -> RowKernels | None:
    """The kernels for the fastest instruction set there is, if they were built when this was first asked."""
    try:
        return RowKernels(build()) if is_built() else None
    except (BackendError, AttributeError):
        return None
