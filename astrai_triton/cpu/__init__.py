"""Inference on a CPU by kernels of our own: one call a step, compiled for the machine it runs on.

``CpuDecoder`` takes the place of a ``Decoder`` in the engine. ``why_not`` says what it does not cover; the
caller then keeps the ``Decoder``.
"""

from __future__ import annotations

from astrai_triton.cpu import abi
from astrai_triton.cpu.abi import Quantize
from astrai_triton.cpu.build import BuildError, build, is_built, why_not_build
from astrai_triton.cpu.decoder import CpuDecoder, why_not
from astrai_triton.cpu.isa import ISAS, Isa

__all__ = [
    "ISAS",
    "BuildError",
    "CpuDecoder",
    "Isa",
    "Quantize",
    "abi",
    "build",
    "is_built",
    "why_not",
    "why_not_build",
]
