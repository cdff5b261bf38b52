"""What a compiled kernel must keep: the rules of ``astrai bench static --check``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from astrai_bench.addresses import find_narrow_products
from astrai_bench.pipeline import find_scalar_dots
from astrai_bench.roofline import find_ceilings

if TYPE_CHECKING:
    from astrai_bench.static import KernelReport
    from astrai_triton.ops.launch import Arch, Variant

FAULT_KINDS = ("compile", "spill", "shared", "mma", "pipeline", "flight", "address")

MIN_FLIGHT_BYTES: Mapping[int, int] = {90: 32 * 1024}
"""Bytes that a multiprocessor must have on their way to keep its share of the memory busy, by capability:
on an H200 4.3 TB/s x about 1 us / 132 multiprocessors."""

# Tiles on their way while one is computed; a single one leaves the memory idle whenever it arrives.
_MIN_TILES = 2
# One group of four warps computes 64 rows with wgmma, and never fewer.
_WGMMA_ROWS = 64


@attrs.frozen
class Fault:
    """What ``--check`` refuses."""

    kind: str
    """One of ``FAULT_KINDS``."""
    text: str


def find_faults(
    report: KernelReport, variant: Variant, arch: Arch, asm: Mapping[str, Any]
) -> tuple[Fault, ...]:
    """Every rule that a compiled kernel breaks.

    Args:
        report: what was measured of it.
        variant: what was compiled.
        arch: what for.
        asm: the compiler's ``ttir`` and ``ttgir``.
    """
    return (
        *_check_resources(report, arch),
        *_check_mma(report, variant, arch, asm["ttgir"]),
        *_check_flight(report, variant, arch),
        *(Fault("address", text) for text in find_narrow_products(asm["ttir"])),
    )


def _check_resources(report: KernelReport, arch: Arch) -> Iterator[Fault]:
    if report.spill_bytes:
        yield Fault("spill", f"{report.spill_bytes} bytes of registers per thread spill to local memory")
    if report.shared_bytes > arch.shared_bytes:
        yield Fault(
            "shared", f"{report.shared_bytes} bytes of shared memory; a CTA has at most {arch.shared_bytes}"
        )


def _check_mma(report: KernelReport, variant: Variant, arch: Arch, ttgir: str) -> Iterator[Fault]:
    if not (variant.uses_dot and _is_narrow(variant)):
        return
    scalar_dots = find_scalar_dots(ttgir)
    for text in scalar_dots:
        yield Fault("mma", text)
    if scalar_dots:
        return
    if not report.mma:
        yield Fault("mma", "16-bit inputs and no matrix instruction at all")
    elif arch.has_wgmma and variant.config.block_m >= _WGMMA_ROWS and "wgmma" not in report.mma:
        yield Fault(
            "mma",
            f"{variant.config.block_m} rows a tile and {'+'.join(report.mma)} alone; "
            f"{arch.name} computes {_WGMMA_ROWS} rows and more with wgmma",
        )


def _check_flight(report: KernelReport, variant: Variant, arch: Arch) -> Iterator[Fault]:
    wanted = report.num_stages - 1
    if variant.uses_dot and report.tiles_in_flight < wanted:
        yield Fault(
            "pipeline",
            f"{report.tiles_in_flight} tiles in flight, wanted stages - 1 = {wanted}; "
            "carry the next tile's addresses through the loop",
        )
    if not _is_decode_bound_by_memory(variant, arch):
        return
    if report.tiles_in_flight < _MIN_TILES:
        yield Fault(
            "flight",
            f"{report.tiles_in_flight} tiles in flight, wanted {_MIN_TILES} where memory is the bound; "
            "raise num_stages",
        )
    least = MIN_FLIGHT_BYTES.get(arch.capability, 0)
    if report.bytes_in_flight < least:
        yield Fault(
            "flight",
            f"{report.bytes_in_flight} bytes in flight on a multiprocessor with {report.resident_ctas} CTAs "
            f"({report.limit}), wanted {least}; raise num_stages or block_n",
        )


def _is_decode_bound_by_memory(variant: Variant, arch: Arch) -> bool:
    """Whether it is decode attention of a group so small that K and V arrive more slowly than they are used.

    Every element of K and V is used in one multiplication and one addition per query head of its group.
    """
    group, itemsize = variant.constexprs.get("GROUP"), variant.tile.get("kv_itemsize")
    if group is None or itemsize is None:
        return False
    ceilings = find_ceilings(arch.capability, "bfloat16" if _is_narrow(variant) else "float32")
    return bool(2 * group / itemsize < ceilings.flops / ceilings.bandwidth)


def _is_narrow(variant: Variant) -> bool:
    return any(re.match(r"\*(fp16|bf16|fp8)", str(kind)) for kind in variant.signature.values())
