"""Inference on a CPU by kernels of our own: one call a step, compiled for the machine it runs on.

``CpuDecoder`` takes the place of a ``Decoder`` in the engine. ``why_not`` says what it does not cover; the
caller then keeps the ``Decoder``.
"""

from __future__ import annotations

from astrai_triton.cpu import abi
from astrai_triton.cpu.abi import Quantize
from astrai_triton.cpu.build import BuildError, build, is_built, why_not_build
from astrai_triton.cpu.decoder import CpuDecoder, why_not, why_not_config
from astrai_triton.cpu.isa import ISAS, Isa
from astrai_triton.cpu.packed import PackedFileError
from astrai_triton.cpu.store import PackedKey, PackedStore, describe

__all__ = [
    "ISAS",
    "BuildError",
    "CpuDecoder",
    "Isa",
    "PackedFileError",
    "PackedKey",
    "PackedStore",
    "Quantize",
    "abi",
    "build",
    "describe",
    "is_built",
    "why_not",
    "why_not_build",
    "why_not_config",
]
