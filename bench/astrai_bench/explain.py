"""What one call of attention comes to: its kernels and grids, its bytes and FLOPs, and its roofline time."""

from __future__ import annotations

import attrs

from astrai_bench.cases import (
    Case,
    Ceilings,
    count_bytes,
    count_flops,
    describe_case,
    is_memory_bound,
    predict_seconds,
)
from astrai_bench.compilation import collect_launches
from astrai_bench.plan import PlannedLaunch
from astrai_bench.roofline import find_ceilings


@attrs.frozen
class Explanation:
    """One call on one architecture."""

    case: Case
    arch: str
    launches: tuple[PlannedLaunch, ...]
    bytes: int
    """That any implementation must move."""
    flops: int
    seconds: float
    """Roofline: no kernel is faster."""
    is_memory_bound: bool
    ceilings: Ceilings


def explain_case(case: Case, capability: int) -> Explanation:
    """Plan a call, compile its kernels and look up its ceilings.

    Args:
        case: dense or paged attention.
        capability: 90 for sm_90.

    Raises:
        BenchError: the call has no kernel.
    """
    ceilings = find_ceilings(capability, case.dtype)
    return Explanation(
        case=case,
        arch=f"sm_{capability}",
        launches=tuple(collect_launches(case, capability)),
        bytes=count_bytes(case),
        flops=count_flops(case),
        seconds=predict_seconds(case, ceilings),
        is_memory_bound=is_memory_bound(case, ceilings),
        ceilings=ceilings,
    )


def describe_explanation(explanation: Explanation) -> list[str]:
    """Lines for a terminal."""
    ceilings = explanation.ceilings
    lines = [describe_case(explanation.case)]
    for launch in explanation.launches:
        lines += _describe_launch(launch)
    bound = "memory" if explanation.is_memory_bound else "arithmetic"
    lines += [
        _row("bytes", f"{explanation.bytes / 1e6:,.1f} MB"),
        _row("FLOPs", f"{explanation.flops / 1e9:,.2f} G"),
        _row("roofline", f"{explanation.seconds * 1e6:,.1f} us, bound by {bound}"),
        _row(
            "ceilings",
            f"{ceilings.bandwidth / 1e12:.2f} TB/s, {ceilings.flops / 1e12:.0f} TFLOP/s ({ceilings.source})",
        ),
    ]
    return lines


def _describe_launch(launch: PlannedLaunch) -> list[str]:
    report = launch.report
    listed = "" if launch.is_listed else ", which is not in the list"
    lines = [_row("variant", f"{report.variant}{listed}")]
    if not report.registers:
        return [*lines, *(_row("refused", fault.text) for fault in report.faults)]
    grid = " x ".join(map(str, launch.grid))
    spill = f", {report.spill_bytes} bytes spilled" if report.spill_bytes else ""
    mma = "+".join(report.mma) or "no MMA"
    shared, flight = report.shared_bytes / 1024, report.bytes_in_flight / 1024
    return [
        *lines,
        _row("  grid", f"{grid} = {launch.ctas} CTAs of {report.num_warps} warps"),
        _row("  CTA", f"{report.registers} registers a thread{spill}, {shared:.1f} KB shared, {mma}"),
        _row("  resident", f"{report.resident_ctas} CTAs an SM, by {report.limit}; {launch.num_sms} SMs"),
        _row("  waves", f"{launch.waves:.2f}"),
        _row("  in flight", f"{report.tiles_in_flight} tiles a CTA, {flight:.1f} KB an SM"),
    ]


def _row(name: str, text: str) -> str:
    return f"{name:<12} {text}"
