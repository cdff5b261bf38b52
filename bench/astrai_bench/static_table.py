"""The static report as text: a table, and the list of its faults."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from astrai_bench.static import KernelReport
from astrai_bench.static_rules import Fault

_COLUMNS = (
    "arch",
    "regs",
    "spill",
    "shared KB",
    "CTA/SM",
    "ahead",
    "flight KB",
    "mma",
    "loads",
    "turn KB",
    "MFLOP",
)


def build_table(reports: Sequence[KernelReport]) -> Table:
    """One row per report, grouped by variant.

    "ahead" is tiles in flight of stages - 1; "flight KB" is per multiprocessor; "turn KB" and "MFLOP" are for
    one turn of the main loop; "loads" counts load instructions by their width in bits.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("variant", overflow="fold")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("arch", "mma", "loads") else "right", no_wrap=True)
    for report in sorted(reports, key=lambda report: report.variant):
        table.add_row(report.variant, *_row(report), style="red" if report.faults else None)
    return table


def list_faults(reports: Sequence[KernelReport]) -> list[str]:
    """One line per distinct fault, with a kernel that has it."""
    kernels: dict[Fault, list[str]] = {}
    for report in reports:
        for fault in report.faults:
            kernels.setdefault(fault, []).append(f"{report.variant} on {report.arch}")
    return [
        f"{fault.kind}: {fault.text} ({names[0]}{f' and {len(names) - 1} more' if names[1:] else ''})"
        for fault, names in kernels.items()
    ]


def _row(report: KernelReport) -> list[str]:
    if not report.registers:
        return [report.arch, "-", "-", "-", "-", "-", "-", "-", "-", "-", "-"]
    return [
        report.arch,
        str(report.registers),
        str(report.spill_bytes),
        f"{report.shared_bytes / 1024:.1f}",
        f"{report.resident_ctas} {report.limit[:3]}",
        f"{report.tiles_in_flight}/{max(0, report.num_stages - 1)}",
        f"{report.bytes_in_flight / 1024:.1f}",
        "+".join(report.mma) or "none",
        " ".join(f"{bits}:{count}" for bits, count in report.loads.items()),
        f"{report.tile_bytes / 1024:.1f}",
        f"{report.tile_flops / 1e6:.2f}",
    ]
