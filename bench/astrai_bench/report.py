"""A run as a table for people and as one JSON object for programs."""

from __future__ import annotations

import datetime
from typing import Any

import attrs
from rich.table import Table

from astrai_bench.cases import Case, Ceilings, describe_case, h200_ceilings, is_memory_bound
from astrai_bench.measure import Report, Row
from astrai_bench.wording import format_count, format_seconds

FORMAT = 1
"""Version of the JSON object; grows when a reader of the old one would go wrong."""


def build_document(report: Report) -> dict[str, Any]:
    """The JSON object of a run.

    Times are microseconds, rates GB/s (1e9 bytes) and TFLOP/s, ``roofline_percent`` is the roofline time over
    the median. What is unknown is null.
    """
    case = report.case
    document: dict[str, Any] = {
        "format": FORMAT,
        "bench": case.op,
        "case": attrs.asdict(case),
        "machine": attrs.asdict(report.machine, filter=lambda field, _: field.name != "versions"),
        "versions": report.machine.versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "work": {"bytes": report.num_bytes, "flops": report.num_flops},
        "ceilings": _describe_ceilings(report.ceilings),
        "roofline_us": report.roofline_s * 1e6,
        "check": {
            "reference": "float64",
            "error": "relative, per head vector",
            "tolerance": report.tolerance,
        },
        "buffers": {"sets": report.num_sets, "leave_cache": report.is_cold},
        "prediction": None,
        "rows": [_build_row(report, row) for row in report.rows],
    }
    if report.machine.kind == "cpu":
        ceilings = h200_ceilings(case.dtype)
        document["prediction"] = {
            **_describe_ceilings(ceilings),
            "us": report.h200_s * 1e6,
            "bound": _name_bound(case, ceilings),
        }
    return document


def _describe_ceilings(ceilings: Ceilings) -> dict[str, Any]:
    return {
        "gb_s": ceilings.bandwidth / 1e9,
        "tflop_s": ceilings.flops / 1e12,
        "source": ceilings.source,
    }


def _name_bound(case: Case, ceilings: Ceilings) -> str:
    return "memory" if is_memory_bound(case, ceilings) else "arithmetic"


def _build_row(report: Report, row: Row) -> dict[str, Any]:
    built: dict[str, Any] = {
        "provider": row.provider,
        "label": row.label,
        "status": row.status,
        "reason": row.reason,
        "error": row.error,
    }
    timing = row.timing
    if timing is None:
        return built
    return built | {
        "median_us": timing.median * 1e6,
        "p10_us": timing.p10 * 1e6,
        "p90_us": timing.p90 * 1e6,
        "repeats": timing.repeats,
        "inner": timing.inner,
        "method": timing.method,
        "gb_s": report.num_bytes / timing.median / 1e9,
        "tflop_s": report.num_flops / timing.median / 1e12,
        "roofline_percent": 100 * report.roofline_s / timing.median,
    }


def build_lines(report: Report) -> list[str]:
    """What to know before reading the table."""
    machine, ceilings, case = report.machine, report.ceilings, report.case
    lines = [
        describe_case(case),
        f"on {machine.name}" + (f", {machine.threads} threads" if machine.kind == "cpu" else ""),
        f"work: {format_count(report.num_bytes)}B, {format_count(report.num_flops)}FLOP; roofline here "
        f"{format_seconds(report.roofline_s)}, bound by {_name_bound(case, ceilings)}",
        f"ceilings: {ceilings.bandwidth / 1e9:.1f} GB/s, {ceilings.flops / 1e12:.3g} TFLOP/s, "
        f"{ceilings.source}",
        f"inputs: {report.num_sets} sets in turn, which "
        + ("leave" if report.is_cold else "STAY IN")
        + f" the cache of {machine.cache_bytes >> 20} MiB",
        f"check: against float64, at most {report.tolerance:.1e} off per head vector",
    ]
    if machine.kind == "cpu":
        h200 = h200_ceilings(case.dtype)
        lines.append(
            f"an H200 needs at least {format_seconds(report.h200_s)}, bound by {_name_bound(case, h200)} "
            f"({h200.bandwidth / 1e12:.1f} TB/s, {h200.flops / 1e12:.0f} TFLOP/s)"
        )
    return lines


def build_table(report: Report) -> Table:
    """One line per provider."""
    table = Table()
    table.add_column("provider", no_wrap=True)
    for name in ("median", "p10 – p90", "GB/s", "TFLOP/s", "% of roofline", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note")
    for row in report.rows:
        error = "" if row.error is None else f"{row.error:.1e}"
        timing = row.timing
        if timing is None:
            table.add_row(row.label, row.status, "", "", "", "", error, row.reason)
            continue
        table.add_row(
            row.label,
            format_seconds(timing.median),
            f"{format_seconds(timing.p10)} – {format_seconds(timing.p90)}",
            f"{report.num_bytes / timing.median / 1e9:.1f}",
            f"{report.num_flops / timing.median / 1e12:.3g}",
            f"{100 * report.roofline_s / timing.median:.1f}",
            error,
            f"{timing.repeats} x {timing.inner} calls, {timing.method}",
        )
    return table
