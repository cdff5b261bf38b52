"""``astrai bench engine``: what a step and a streamed token cost beside the model, in CPU time."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import click

from astrai_bench.errors import BenchError

FORMAT = 1
STEP_TARGET_US, TOKEN_TARGET_US = 100.0, 5.0
"""What a step of 64 tasks, and a token of 64 streams, should cost at most."""

_TASKS = (1, 16, 64, 256)
_STREAMS = (1, 16, 64)


@click.command(short_help="CPU time of a scheduler step and of a streamed token, without a model.")
@click.option("--steps", type=click.IntRange(10), default=400, show_default=True, help="Steps to time.")
@click.option("--tokens", type=click.IntRange(8), default=200, show_default=True, help="Tokens of a stream.")
@click.option("--no-http", is_flag=True, help="Leave the streams out.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also to a file.")
def engine(steps: int, tokens: int, no_http: bool, json_path: Path | None) -> None:
    """Run the real scheduler, cache, sampler and server over a model that looks its answer up in a table.

    Times are CPU time of the thread that does the work. A step is everything but the model's forward; what
    the sampler's torch operations take of it stands by itself, the rest is the scheduler's own: slots, plan,
    hand-over. A token is what the event loop does for it: text, frame, socket; beside it stands what bare
    sockets cost for the same bytes. Policies are compared on a simulated clock. The last line is JSON.
    """
    from rich.console import Console

    console = Console(stderr=False)
    try:
        document = _measure(console, steps, tokens, with_http=not no_http)
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    _print(console, document)
    line = json.dumps(document, separators=(",", ":"))
    if json_path is not None:
        json_path.write_text(line + "\n", encoding="utf-8")
    click.echo(line)


def _measure(console: Any, steps: int, tokens: int, *, with_http: bool) -> dict[str, Any]:
    import torch
    from rich.progress import Progress

    from astrai_bench.machine import describe_machine
    from astrai_bench.steps import simulate_load, time_steps
    from astrai_bench.streams import time_streams
    from astrai_triton.engine.budget import POLICIES

    # The table is small: threads would only wait for each other.
    torch.set_num_threads(1)
    machine = describe_machine(torch.device("cpu"))
    jobs: list[tuple[str, str, Callable[[], Any]]] = [
        *(("steps", f"{count} tasks", partial(time_steps, count, steps)) for count in _TASKS),
        ("steps", "64 tasks, top-k", partial(time_steps, 64, steps, temperature=0.8)),
        *(("policies", policy, partial(simulate_load, policy)) for policy in POLICIES),
        *(
            ("streams", f"{count} streams", partial(time_streams, count, tokens))
            for count in (_STREAMS if with_http else ())
        ),
    ]
    measured: dict[str, list[Any]] = {"steps": [], "policies": [], "streams": []}
    with Progress(transient=True, console=console, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("engine", total=len(jobs))
        for section, name, job in jobs:
            progress.update(bar, description=name)
            measured[section].append(attrs.asdict(job()))
            progress.advance(bar)
    return {
        "format": FORMAT,
        "bench": "engine",
        "machine": attrs.asdict(machine),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "targets": {"step_64_us": STEP_TARGET_US, "token_64_us": TOKEN_TARGET_US},
        **measured,
    }


def _print(console: Any, document: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="one decode step, CPU µs without the forward")
    for name in ("tasks", "kind", "mean", "p50", "p99", "sampler", "rest", "forward"):
        table.add_column(name, justify="right")
    for row in document["steps"]:
        own = row["mean_us"] - row["sampling_us"]
        parts = (row["mean_us"], row["p50_us"], row["p99_us"], row["sampling_us"], own, row["model_us"])
        table.add_row(str(row["num_tasks"]), row["sampling"], *(f"{part:.0f}" for part in parts))
    console.print(table)
    if document["streams"]:
        table = Table(title="one streamed token, CPU µs of the event loop")
        for name in ("streams", "tokens", "all", "bare sockets", "HTTP and SSE"):
            table.add_column(name, justify="right")
        for row in document["streams"]:
            own_us = row["cpu_us"] - row["send_us"]
            count = row["num_streams"] * row["num_tokens"]
            times = (row["cpu_us"], row["send_us"], own_us)
            table.add_row(str(row["num_streams"]), str(count), *(f"{number:.2f}" for number in times))
        console.print(table)
    table = Table(title="mixed load, simulated ms: forward 4 ms + 0.1 ms a token")
    for name in ("policy", "TTFT short p50", "p95", "TTFT long p50", "worst gap", "tok/s"):
        table.add_column(name, justify="right")
    for row in document["policies"]:
        values = [value for key, value in row.items() if key != "policy"]
        table.add_row(row["policy"], *(f"{number:.0f}" for number in values))
    console.print(table)
    for text, value, target in _compare(document):
        console.print(
            f"{text}: {value:.1f} µs, target {target:.0f} µs: {'met' if value <= target else 'MISSED'}"
        )


def _compare(document: dict[str, Any]) -> list[tuple[str, float, float]]:
    steps = [
        ("scheduling of 64 tasks, mean", row["mean_us"] - row["sampling_us"], STEP_TARGET_US)
        for row in document["steps"]
        if row["num_tasks"] == 64 and row["sampling"] == "greedy"
    ]
    tokens = [
        ("token of 64 streams, beside bare sockets", row["cpu_us"] - row["send_us"], TOKEN_TARGET_US)
        for row in document["streams"]
        if row["num_streams"] == 64
    ]
    return steps + tokens
