"""Cross-validation as a table for people and as a JSON object for programs."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from rich.table import Table

from astrai_bench.cross_cases import CROSS_OPS, CrossCase, describe_cross_case
from astrai_bench.cross_compare import FLOAT32_SLACK, HALF_ULP, LSE_TOLERANCE
from astrai_bench.cross_run import Availability, CaseResult, Pair
from astrai_bench.machine import Machine

FORMAT = 1
"""Version of the JSON object; grows when a reader of the old one would go wrong."""


@attrs.frozen(kw_only=True)
class CrossReport:
    """Everything about one run."""

    machine: Machine
    seed: int
    num_random: int
    availability: tuple[Availability, ...]
    missing: tuple[str, ...]
    """Implementations that were required and do not take part."""
    results: tuple[CaseResult, ...]

    @property
    def wrong(self) -> tuple[CaseResult, ...]:
        """Calls with anything wrong."""
        return tuple(result for result in self.results if result.is_wrong)

    @property
    def is_wrong(self) -> bool:
        """Whether the exit status is 1."""
        broken = any(entry.status == "failed" for entry in self.availability)
        return bool(self.wrong or self.missing or broken or not any(result.pairs for result in self.results))


def build_cross_lines(report: CrossReport) -> list[str]:
    """What to know before reading the table."""
    machine = report.machine
    lines = [
        f"{len(report.results)} calls, {report.num_random} of them random with seed {report.seed}",
        f"on {machine.name}",
        "tolerance: relative, per head vector: for each rounding of the two to the dtype "
        + ", ".join(f"{half:.1e} in {dtype}" for dtype, half in HALF_ULP.items())
        + f", and {FLOAT32_SLACK:.0e}; lse {LSE_TOLERANCE:.0e} over max(1, |lse|)",
        "each call runs with NaN and with 0 in all memory it does not use, and must give the same bits",
    ]
    lines += [
        f"{entry.provider}: {entry.status}{': ' if entry.reason else ''}{entry.reason}"
        for entry in report.availability
    ]
    return lines


def build_cross_table(report: CrossReport, *, is_brief: bool) -> Table:
    """One line per call and pair of implementations; brief: per operation and pair, and all that is wrong."""
    table = Table()
    for name in ("op", "case", "pair"):
        table.add_column(name, no_wrap=name != "case", overflow="fold")
    for name in ("abs", "rel", "tolerance", "ulp", "lse"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    rows = _brief_rows(report) if is_brief else _all_rows(report.results)
    last = ("", "")
    for op, text, cells in rows:
        is_same = (op, text) == last
        last = (op, text)
        table.add_row(
            *(("", "") if is_same else last), *cells, style="red" if cells[-1].startswith("!") else None
        )
    return table


_Row = tuple[str, str, tuple[str, ...]]


def _all_rows(results: Sequence[CaseResult]) -> Iterator[_Row]:
    for result in results:
        op, text = result.case.op, describe_cross_case(result.case)
        for pair in result.pairs:
            yield op, text, _pair_cells(pair)
        for run in result.runs:
            if run.status != "ran":
                note = f"! {run.reason}" if run.status == "failed" else run.reason
                yield op, text, (run.provider, run.status, "", "", "", "", note)
            for violation in run.violations:
                yield op, text, (run.provider, "", "", "", "", "", f"! {violation}")


def _brief_rows(report: CrossReport) -> Iterator[_Row]:
    for op in CROSS_OPS:
        worst: dict[tuple[str, str], tuple[Pair, CrossCase, int]] = {}
        for result in report.results:
            for pair in result.pairs if result.case.op == op else ():
                before, case, count = worst.get((pair.a, pair.b), (pair, result.case, 0))
                if _share_of_tolerance(pair) > _share_of_tolerance(before):
                    before, case = pair, result.case
                worst[pair.a, pair.b] = before, case, count + 1
        for pair, case, count in worst.values():
            cells = _pair_cells(pair)
            note = f"{cells[-1]}{count} calls, this one: {describe_cross_case(case)}"
            yield op, "worst of its calls", (*cells[:-1], note)
        skipped: dict[tuple[str, str], int] = {}
        for result in report.results:
            for run in result.runs if result.case.op == op else ():
                if run.status == "skipped":
                    key = run.provider, run.reason
                    skipped[key] = skipped.get(key, 0) + 1
        for (provider, reason), count in skipped.items():
            cells = (provider, "skipped", "", "", "", "", f"{count} calls: {reason}")
            yield op, "worst of its calls", cells
    yield from _all_rows(report.wrong)


def _share_of_tolerance(pair: Pair) -> float:
    return pair.difference.relative / pair.tolerance


def _pair_cells(pair: Pair) -> tuple[str, ...]:
    difference = pair.difference
    return (
        f"{pair.a} / {pair.b}",
        f"{difference.absolute:.1e}",
        f"{difference.relative:.1e}",
        f"{pair.tolerance:.1e}",
        f"{difference.ulp:.2f}",
        "" if difference.lse is None else f"{difference.lse:.1e}",
        "! over tolerance " if pair.is_over else "",
    )


def build_cross_document(report: CrossReport, *, is_whole: bool) -> dict[str, Any]:
    """The JSON object of a run; without ``is_whole`` only calls with anything wrong are listed.

    A difference that is not finite is null.
    """
    listed = report.results if is_whole else report.wrong
    pairs = [pair for result in report.results for pair in result.pairs]
    return {
        "format": FORMAT,
        "bench": "cross",
        "machine": attrs.asdict(report.machine, filter=lambda field, _: field.name != "versions"),
        "versions": report.machine.versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": report.seed,
        "random": report.num_random,
        "check": {
            "reference": "float64",
            "error": "relative, per head vector",
            "per_rounding": HALF_ULP,
            "float32_slack": FLOAT32_SLACK,
            "lse": LSE_TOLERANCE,
        },
        "providers": [attrs.asdict(entry) for entry in report.availability],
        "missing": list(report.missing),
        "calls": len(report.results),
        "pairs": len(pairs),
        "pairs_over": sum(pair.is_over for pair in pairs),
        "calls_wrong": len(report.wrong),
        "is_wrong": report.is_wrong,
        "results": [_build_result(result) for result in listed],
    }


def _build_result(result: CaseResult) -> dict[str, Any]:
    return {
        "op": result.case.op,
        "name": describe_cross_case(result.case),
        "case": attrs.asdict(result.case),
        "is_wrong": result.is_wrong,
        "runs": [attrs.asdict(run) for run in result.runs],
        "pairs": [_build_pair(pair) for pair in result.pairs],
    }


def _build_pair(pair: Pair) -> dict[str, Any]:
    figures = attrs.asdict(pair.difference)
    finite = {
        name: value if value is not None and math.isfinite(value) else None for name, value in figures.items()
    }
    return {"a": pair.a, "b": pair.b, **finite, "tolerance": pair.tolerance, "is_over": pair.is_over}
