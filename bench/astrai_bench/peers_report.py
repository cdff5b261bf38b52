"""What the peers' runs come to: rates, and how many times ours they are, round by round."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from astrai_bench.errors import BenchError
from astrai_bench.peers_run import OWN, Record

START_MARK, END_MARK = "<!-- peers:start -->", "<!-- peers:end -->"

_BASELINE = "bf16"
_BASELINES = {"int8": "int8", "q8_0": "int8", "int4": "int8", "source": "int8"}
"""Variant of a peer -> ours that it is compared with; the others have 16 bits and meet ``_BASELINE``."""


@attrs.frozen(kw_only=True)
class Metric:
    """One figure of a run."""

    name: str
    title: str
    is_rate: bool
    """More is better; else less is."""


METRICS = (
    Metric(name="single_tok_s", title="one stream, tok/s", is_rate=True),
    Metric(name="batch_tok_s", title="{batch} at once, tok/s", is_rate=True),
    Metric(name="prefill_tok_s", title="prompt of {prefill}, tok/s", is_rate=True),
    Metric(name="http_tok_s", title="{clients} HTTP clients, tok/s", is_rate=True),
    Metric(name="http_ttft_ms", title="their first token, ms", is_rate=False),
    Metric(name="start_s", title="start to first token, s", is_rate=False),
    Metric(name="http_start_s", title="of the server, s", is_rate=False),
)


@attrs.frozen(kw_only=True)
class Figure:
    """A metric over all rounds."""

    value: float
    """Median of the rounds."""
    low: float
    high: float
    ours_better: tuple[float, float, float] | None
    """How many times better ours was in the same round: median, least, most. None for our own row."""


@attrs.frozen(kw_only=True)
class PeerRow:
    """A variant of a peer, or why there is none."""

    peer: str
    variant: str | None
    versions: Mapping[str, str]
    figures: Mapping[str, Figure]
    same_tokens: tuple[int, int] | None
    """Of a greedy answer: how many tokens agree with ours before the first that does not, and of how many."""
    reasons: Mapping[str, str]
    """What was not measured ("run", "http") and why."""


def derive_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one variant's run. Medians of its repetitions, then rates."""
    sizes = result["sizes"]
    middle = {
        name: statistics.median(result[f"{name}_s"]) for name in ("prefill", "first", "single", "batch")
    }
    found = {
        "start_s": result["start_s"],
        "prefill_tok_s": sizes["prefill"] / middle["prefill"],
        "batch_tok_s": sizes["batch"] * sizes["answer"] / middle["batch"],
    }
    # On a busy machine one token may take longer than all of another call.
    if middle["single"] > middle["first"]:
        found["single_tok_s"] = (sizes["answer"] - 1) / (middle["single"] - middle["first"])
    http = result.get("http") or {}
    if "output_tok_s" in http:
        found["http_tok_s"] = http["output_tok_s"]
        found["http_ttft_ms"] = http["latency"]["ttft_ms"]["p50"]
        found["http_start_s"] = http["first_token_s"]
    return found


def build_rows(records: Sequence[Record]) -> list[PeerRow]:
    """Our own rows, then every variant of every peer in the order of the runs."""
    runs: dict[tuple[str, str], list[_Run]] = {}
    ours: dict[tuple[int, str, str], Mapping[str, Any]] = {}
    failed = []
    for record in records:
        if "reason" in record.result:
            failed.append(_build_failed(record.peer, None, record.result["reason"]))
        for variant, result in record.result["variants"].items():
            runs.setdefault((record.peer, variant), []).append((record.round, record.pair, result))
            if record.peer == OWN:
                ours[record.round, record.pair, variant] = result
    if not ours:
        raise BenchError("peers: wanted at least one run of our own, got none")
    own_first = sorted(runs, key=lambda key: key[0] != OWN)
    rows = [_summarise(peer, variant, runs[peer, variant], ours) for peer, variant in own_first]
    num_own = sum(row.peer == OWN for row in rows)
    return [*rows[:num_own], *failed, *rows[num_own:]]


_Run = tuple[int, str, Mapping[str, Any]]
"""Round, the peer it was compared for, result."""


def _summarise(
    peer: str, variant: str, runs: Sequence[_Run], ours: Mapping[tuple[int, str, str], Mapping[str, Any]]
) -> PeerRow:
    good = [run for run in runs if "reason" not in run[2]]
    if not good:
        return _build_failed(peer, variant, runs[0][2]["reason"])
    baseline = _BASELINES.get(variant, _BASELINE)
    pairs: list[tuple[Mapping[str, float], Mapping[str, float] | None]] = []
    for idx, pair, result in good:
        other = None if peer == OWN else ours.get((idx, pair, baseline))
        is_there = other is not None and "reason" not in other
        pairs.append((derive_metrics(result), derive_metrics(other) if other and is_there else None))
    # Whatever the bits, the text is compared with ours in 16.
    texts = [result for (_, _, name), result in ours.items() if name == _BASELINE and "check" in result]
    reference = texts[0] if texts else good[0][2]
    return _build_row(peer, variant, pairs, [result for _, _, result in good], reference)


def _build_failed(peer: str, variant: str | None, reason: str) -> PeerRow:
    return PeerRow(
        peer=peer, variant=variant, versions={}, figures={}, same_tokens=None, reasons={"run": reason}
    )


def _build_row(
    peer: str,
    variant: str,
    pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float] | None]],
    results: Sequence[Mapping[str, Any]],
    reference: Mapping[str, Any],
) -> PeerRow:
    figures = {}
    for metric in METRICS:
        shared = [(a[metric.name], b) for a, b in pairs if metric.name in a]
        if not shared:
            continue
        values = [value for value, _ in shared]
        ratios = [
            b[metric.name] / value if metric.is_rate else value / b[metric.name]
            for value, b in shared
            if b is not None and metric.name in b
        ]
        better = (statistics.median(ratios), min(ratios), max(ratios)) if ratios else None
        figures[metric.name] = Figure(
            value=statistics.median(values), low=min(values), high=max(values), ours_better=better
        )
    https = [result.get("http") or {} for result in results]
    reasons = [http["reason"] for http in https if "reason" in http]
    return PeerRow(
        peer=peer,
        variant=variant,
        versions=results[0]["versions"],
        figures=figures,
        same_tokens=(_count_same(results[0]["check"], reference["check"]), len(reference["check"])),
        reasons={"http": reasons[0]} if reasons else {},
    )


def _count_same(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((idx for idx, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def format_table(rows: Sequence[PeerRow], sizes: Mapping[str, int]) -> str:
    """A Markdown table, and a line for everything that was not measured.

    A cell is the median of the rounds and, in brackets, how many times better ours was: median, least and
    most.
    """
    titles = ["engine", *(metric.title.format(**sizes) for metric in METRICS), "same tokens"]
    lines = [f"| {' | '.join(titles)} |", f"|---|{'---:|' * (len(titles) - 1)}"]
    notes = []
    for row in rows:
        name = row.peer if row.variant is None else f"{row.peer}, {row.variant}"
        if "run" in row.reasons:
            lines.append(f"| {name} | {' | '.join('–' for _ in titles[1:])} |")
            notes.append(f"- {name}: {row.reasons['run']}")
            continue
        cells = [_format_cell(row.figures.get(metric.name)) for metric in METRICS]
        assert row.same_tokens is not None
        lines.append(f"| {name} | {' | '.join(cells)} | {row.same_tokens[0]}/{row.same_tokens[1]} |")
        if "http" in row.reasons:
            notes.append(f"- {name}, no HTTP: {row.reasons['http']}")
    return "\n".join([*lines, *(["", *dict.fromkeys(notes)] if notes else [])])


def _format_cell(figure: Figure | None) -> str:
    if figure is None:
        return "–"
    value = f"{figure.value:.3g}" if figure.value < 1000 else f"{figure.value:.0f}"
    if figure.ours_better is None:
        return value
    middle, low, high = (f"{ratio:.2f}" for ratio in figure.ours_better)
    # Of one round there is no spread.
    return f"{value} ({middle}×)" if low == high else f"{value} ({middle}×, {low}–{high})"


def format_section(document: Mapping[str, Any], rows: Sequence[PeerRow]) -> str:
    """The README's part: what was measured, where and when, the table."""
    sizes = document["sizes"]
    machine = document["machine"]
    versions = {row.peer: row.versions for row in rows if row.versions}
    told = [
        f"{peer}: {', '.join(f'{package} {version}' for package, version in packages.items())}"
        for peer, packages in versions.items()
    ]
    return "\n".join(
        [
            f"The values of {document['model']}; {machine['name']}, {document['threads']} threads, "
            f"{document['date'][:10]}; rounds: {document['rounds']}, each engine after ours. Prompts of "
            f"{sizes['prompt']} tokens, answers of {sizes['answer']}, greedy. In brackets: how many times "
            "better ours was in the same round, of several rounds also least and most; variants of 8 and 4 "
            "bits are compared with our int8, the others with our bf16; `source` is the file as it was "
            "fetched.",
            "",
            format_table(rows, sizes),
            "",
            f"Versions: {'; '.join(told)}.",
        ]
    )


def replace_section(path: Path, section: str) -> bool:
    """Put ``section`` between the marks of a file; False where it has none.

    Raises:
        BenchError: one mark is there without the other, or behind it, or the file is not readable.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--readme {path}: {error}") from error
    start, end = text.find(START_MARK), text.find(END_MARK)
    if start < 0 and end < 0:
        return False
    if not 0 <= start < end:
        raise BenchError(f"--readme {path}: wanted {START_MARK} and after it {END_MARK}")
    changed = f"{text[: start + len(START_MARK)]}\n{section}\n{text[end:]}"
    path.write_text(changed, encoding="utf-8")
    return True


def name_result(machine: str, date: str) -> str:
    """File name of a result: what the machine is called, and the day."""
    slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return f"peers-{slug}-{date[:10]}.json"
