"""How many CTAs of a kernel a multiprocessor holds at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from astrai_triton.ops.launch import Arch

# Granularity of the register file: registers of a warp, and warps, one per sub-core.
_REGISTER_UNIT = 256
_WARP_UNIT = 4
# What the driver takes from the share of each CTA.
_RESERVED_SHARED_BYTES = 1024


@attrs.frozen
class Occupancy:
    """Resident CTAs per multiprocessor, and what keeps them from being more."""

    ctas: int
    limit: str
    """``registers``, ``shared``, ``warps`` or ``ctas``."""


def find_occupancy(arch: Arch, registers: int, shared_bytes: int, num_warps: int) -> Occupancy:
    """Fit CTAs into a multiprocessor.

    Args:
        arch: whose limits count.
        registers: per thread, >= 1.
        shared_bytes: per CTA.
        num_warps: per CTA.

    Returns:
        0 CTAs when not even one fits.
    """
    warp_registers = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    warps_by_registers = arch.sm_registers // warp_registers // _WARP_UNIT * _WARP_UNIT
    fits = {
        "registers": warps_by_registers // num_warps,
        "shared": arch.sm_shared_bytes // (shared_bytes + _RESERVED_SHARED_BYTES),
        "warps": arch.max_sm_threads // 32 // num_warps,
        "ctas": arch.max_sm_ctas,
    }
    if shared_bytes > arch.shared_bytes:
        fits["shared"] = 0
    limit = min(fits, key=lambda name: fits[name])
    return Occupancy(fits[limit], limit)
