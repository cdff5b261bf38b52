"""Two saved runs of one case, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
from rich.table import Table

from astrai_bench.errors import BenchError
from astrai_bench.wording import format_seconds

FORMAT = 1
"""The version of the JSON object that is understood here; the same as ``report.FORMAT``."""


@attrs.frozen(kw_only=True)
class Pair:
    """One provider in both runs; None where a run has no timing of it."""

    provider: str
    a_us: float | None
    b_us: float | None
    ratio: float | None
    """Time of B over time of A: below 1, B is faster."""
    is_apart: bool
    """Whether the ranges from p10 to p90 do not overlap, so that the difference is more than noise."""


def load_document(path: Path) -> dict[str, Any]:
    """The JSON object of a run: a ``--json`` file, or everything a bench printed.

    Raises:
        BenchError: the file is not readable, or its last line is no such object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: {error}") from error
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        document = json.loads(last)
    except ValueError as error:
        raise BenchError(
            f"{path}: wanted the JSON object of a kernel bench on the last line, got {last[:60]!r}"
        ) from error
    if not isinstance(document, dict) or not {"format", "case", "rows"} <= document.keys():
        raise BenchError(f"{path}: the last line is JSON, but not of a kernel bench")
    if document["format"] != FORMAT:
        raise BenchError(
            f"{path}: wanted format {FORMAT}, got {document['format']}; run the bench again to compare"
        )
    return document


def compare_documents(a: dict[str, Any], b: dict[str, Any]) -> tuple[Pair, ...]:
    """Providers that either run timed, in the order of A.

    Raises:
        BenchError: the runs are of different cases.
    """
    names = sorted(a["case"].keys() | b["case"].keys())
    differing = [name for name in names if a["case"].get(name) != b["case"].get(name)]
    if differing:
        found = ", ".join(f"{name} {a['case'].get(name)} and {b['case'].get(name)}" for name in differing)
        raise BenchError(f"wanted two runs of one case, got {found}")
    rows_a, rows_b = (
        {row["label"]: row for row in run["rows"] if row["status"] == "timed"} for run in (a, b)
    )
    return tuple(_pair(label, rows_a.get(label), rows_b.get(label)) for label in rows_a | rows_b)


def _pair(label: str, a: dict[str, Any] | None, b: dict[str, Any] | None) -> Pair:
    a_us = None if a is None else float(a["median_us"])
    b_us = None if b is None else float(b["median_us"])
    if a is None or b is None or a_us is None or b_us is None:
        return Pair(provider=label, a_us=a_us, b_us=b_us, ratio=None, is_apart=False)
    is_apart = a["p90_us"] < b["p10_us"] or b["p90_us"] < a["p10_us"]
    return Pair(provider=label, a_us=a_us, b_us=b_us, ratio=b_us / a_us, is_apart=is_apart)


def build_pair_table(pairs: tuple[Pair, ...]) -> Table:
    """One line per provider."""
    table = Table()
    table.add_column("provider", no_wrap=True)
    for name in ("A", "B", "B / A"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note")
    for pair in pairs:
        times = ["–" if us is None else format_seconds(us * 1e-6) for us in (pair.a_us, pair.b_us)]
        if pair.ratio is None:
            table.add_row(pair.provider, *times, "–", "timed in one run only")
            continue
        verdict = "B is faster" if pair.ratio < 1 else "B is slower"
        note = verdict if pair.is_apart else "within the spread"
        table.add_row(pair.provider, *times, f"{pair.ratio:.3f}", note)
    return table


def build_pair_document(paths: tuple[Path, Path], pairs: tuple[Pair, ...]) -> dict[str, Any]:
    """The JSON object of a comparison."""
    return {"compare": [str(path) for path in paths], "rows": [attrs.asdict(pair) for pair in pairs]}
