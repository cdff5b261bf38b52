"""A load as numbers: what was asked, what came, how fast, and what the measuring cost."""

from __future__ import annotations

import datetime
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from astrai_bench.load import Load, Run
from astrai_bench.protocols import Answer

FORMAT = 1
"""Version of the JSON object; grows when a reader of the old one would go wrong."""

MAX_CLIENT_SHARE = 0.5
"""Of one CPU: above it the client may be what limits the load, and the report says so."""

_PERCENTILES = (50, 90, 99)
_LATENCIES = (
    ("ttft_ms", "time to first token"),
    ("itl_ms", "between chunks"),
    ("tpot_ms", "per output token after the first"),
    ("latency_ms", "request"),
)


def find_percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest of the sorted ``values``, as NumPy's default; not for an empty list."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def describe_times(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in milliseconds of ``values`` in seconds; None for none."""
    if not values:
        return None
    found = {"mean": sum(values) / len(values), "max": max(values)}
    found |= {f"p{percent}": find_percentile(values, percent) for percent in _PERCENTILES}
    return {name: round(value * 1e3, 4) for name, value in found.items()}


def build_document(load: Load, run: Run, *, slo_ttft_ms: float | None = None) -> dict[str, Any]:
    """The JSON object of a load. Latencies are milliseconds, of requests that were answered in full."""
    good = [answer for answer in run.answers if answer.error is None]
    errors = Counter(answer.error for answer in run.answers if answer.error is not None)
    wall_s = run.ended_s - run.started_s
    output = sum(answer.num_tokens for answer in good)
    counted = [answer.input_tokens for answer in good if answer.input_tokens is not None]
    return {
        "format": FORMAT,
        "bench": "serve",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load": _describe_load(load, run),
        "requests": {
            "sent": len(run.answers),
            "answered": len(good),
            "failed": sum(errors.values()),
            "errors": dict(errors.most_common()),
            "example": next((answer.detail for answer in run.answers if answer.error is not None), None),
            "shorter_than_max_tokens": sum(answer.num_tokens < answer.max_tokens for answer in good),
        },
        "wall_s": round(wall_s, 4),
        "output_tok_s": round(output / wall_s, 3),
        "input_tok_s": round(sum(counted) / wall_s, 3) if counted else None,
        "requests_s": round(len(good) / wall_s, 4),
        "tokens": {
            "output": output,
            "input": sum(counted) if counted else None,
            "cached": sum(answer.cached_tokens for answer in good),
            "input_min": min(counted, default=None),
            "input_max": max(counted, default=None),
            "counted_by": _name_counter(good),
            "per_chunk": round(output / max(1, sum(len(answer.chunks_s) for answer in good)), 3),
        },
        "latency": {name: describe_times(values) for name, values in collect_latencies(good).items()},
        "goodput": _describe_goodput(good, slo_ttft_ms, wall_s),
        "client": _describe_client(run, wall_s),
    }


def collect_latencies(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Seconds of every kind of latency, from answers without an error."""
    found: dict[str, list[float]] = {name: [] for name, _ in _LATENCIES}
    for answer in answers:
        first, last = answer.chunks_s[0], answer.chunks_s[-1]
        found["ttft_ms"].append(first - answer.sent_s)
        found["itl_ms"] += [after - before for before, after in itertools.pairwise(answer.chunks_s)]
        if answer.num_tokens > 1:
            found["tpot_ms"].append((last - first) / (answer.num_tokens - 1))
        found["latency_ms"].append((answer.done_s or last) - answer.sent_s)
    return found


def _describe_load(load: Load, run: Run) -> dict[str, Any]:
    return {
        "url": load.url,
        "protocol": load.protocol.name,
        "model": load.question.model,
        "loop": "open" if load.rate is not None else "closed",
        "clients": load.clients,
        "rate": load.rate,
        "num_requests": load.num_requests,
        "num_warmup": load.num_warmup,
        "input_tokens": None if load.prompts else load.input_tokens,
        "words": run.num_words,
        "prompts": len(load.prompts) or None,
        "max_tokens": load.question.max_tokens,
        "temperature": load.question.temperature,
        "ignore_eos": load.question.ignore_eos,
        "seed": load.seed,
    }


def _name_counter(answers: Sequence[Answer]) -> str:
    names = {"usage" if answer.output_tokens is not None else "chunks" for answer in answers}
    return names.pop() if len(names) == 1 else "usage and chunks" if names else "nothing"


def _describe_goodput(
    answers: Sequence[Answer], slo_ttft_ms: float | None, wall_s: float
) -> dict[str, Any] | None:
    if slo_ttft_ms is None:
        return None
    within = [answer for answer in answers if (answer.chunks_s[0] - answer.sent_s) * 1e3 <= slo_ttft_ms]
    return {
        "slo_ttft_ms": slo_ttft_ms,
        "requests": len(within),
        "requests_s": round(len(within) / wall_s, 4),
        "output_tok_s": round(sum(answer.num_tokens for answer in within) / wall_s, 3),
    }


def _describe_client(run: Run, wall_s: float) -> dict[str, Any]:
    chunks = sum(len(answer.chunks_s) for answer in run.answers)
    share = run.cpu_s / wall_s
    return {
        "cpu_s": round(run.cpu_s, 4),
        "cpu_share": round(share, 4),
        "cpu_us_per_chunk": round(run.cpu_s / chunks * 1e6, 2) if chunks else None,
        "lag_ms": describe_times(run.lags_s),
        "late_ms": describe_times(run.late_s),
        "is_limit": share > MAX_CLIENT_SHARE,
    }


def build_table(document: dict[str, Any]) -> Table:
    """Latencies of a load, a line each."""
    load = document["load"]
    shape = f"{load['clients']} clients" if load["loop"] == "closed" else f"{load['rate']:g} requests/s"
    table = Table(title=f"{load['model']}, {load['protocol']}, {shape}, ms")
    table.add_column("latency", no_wrap=True)
    for name in ("mean", *(f"p{percent}" for percent in _PERCENTILES), "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, title in _LATENCIES:
        times = document["latency"][name] or {}
        cells = [times.get(column) for column in ("mean", "p50", "p90", "p99", "max")]
        table.add_row(title, *("–" if cell is None else f"{cell:.1f}" for cell in cells))
    return table


def describe_lines(document: dict[str, Any]) -> list[str]:
    """The rest of a load in words."""
    requests, tokens, client = document["requests"], document["tokens"], document["client"]
    lines = [
        f"{requests['answered']} of {requests['sent']} requests answered in {document['wall_s']:.1f} s: "
        f"{document['output_tok_s']:.1f} output tok/s, {_format(document['input_tok_s'])} input tok/s, "
        f"{document['requests_s']:.2f} requests/s",
        f"tokens by {tokens['counted_by']}, {tokens['per_chunk']:.2f} a chunk; prompts of "
        f"{tokens['input_min']} to {tokens['input_max']} tokens",
    ]
    if tokens["cached"]:
        lines.append(f"{tokens['cached']} of {tokens['input']} input tokens came from the server's cache")
    if requests["shorter_than_max_tokens"]:
        lines.append(f"{requests['shorter_than_max_tokens']} answers ended before max_tokens")
    if document["goodput"]:
        goodput = document["goodput"]
        lines.append(
            f"goodput, first token within {goodput['slo_ttft_ms']:g} ms: {goodput['requests']} requests, "
            f"{goodput['requests_s']:.2f}/s"
        )
    lag = (client["lag_ms"] or {}).get("p99")
    lines.append(
        f"the client took {client['cpu_share']:.1%} of a CPU, {_format(client['cpu_us_per_chunk'])} µs "
        f"a chunk; its clock was late by {_format(lag)} ms (p99)"
    )
    if client["is_limit"]:
        lines.append(
            f"MORE than {MAX_CLIENT_SHARE:.0%} of a CPU: the client may be the limit; take fewer clients"
        )
    if requests["errors"]:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in requests["errors"].items())
        lines.append(f"failed: {kinds}" + (f"; e.g. {requests['example']}" if requests["example"] else ""))
    return lines


def _format(number: float | None) -> str:
    return "–" if number is None else f"{number:.1f}"
