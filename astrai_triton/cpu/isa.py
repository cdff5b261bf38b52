"""Which instruction sets there are builds for, and which of them this CPU has."""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Literal

Isa = Literal["amx", "avx512_bf16", "avx512", "avx2", "plain"]
"""From the fastest to what runs everywhere."""

ISAS: tuple[Isa, ...] = ("amx", "avx512_bf16", "avx512", "avx2", "plain")

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")

FLAGS: dict[Isa, tuple[str, ...]] = {
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "plain": (),
}
"""What makes the compiler use it."""

_NEEDS: dict[Isa, frozenset[str]] = {
    "amx": frozenset({"amx_tile", "amx_bf16", "amx_int8"}),
    "avx512_bf16": frozenset({"avx512_bf16", "avx512_vnni"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "plain": frozenset(),
}


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What Linux says the CPU can do; empty where it does not say."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    listed = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(listed.split())


def list_isas(flags: frozenset[str]) -> list[Isa]:
    """The instruction sets that a CPU with ``flags`` has, the fastest first; each includes those after it."""
    has: list[Isa] = []
    for isa in reversed(ISAS):
        if not _NEEDS[isa] <= flags:
            break
        has.insert(0, isa)
    return has
