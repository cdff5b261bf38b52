"""``astrai bench cross``: every implementation of every operation against every other and against float64."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import torch

    from astrai_bench.cross_cases import CrossCase
    from astrai_bench.cross_report import CrossReport
    from astrai_bench.cross_run import CaseResult

_PROVIDERS = ("triton", "cuda_scalar", "cuda_mma", "torch_native")
_PIPE_WIDTH = 200
"""A table cut to the width of a pipe would be of no use to what reads it."""


def _parse_names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """``"triton,cuda_mma"`` -> ``("triton", "cuda_mma")``."""
    names = tuple(name.strip() for name in value.split(",")) if value else ()
    for name in names:
        if name not in _PROVIDERS:
            raise click.BadParameter(f"wanted some of {','.join(_PROVIDERS)}, got {name!r}")
    return names


@click.command(short_help="Triton, CUDA and torch against each other and against float64.")
@click.option(
    "--random",
    "num_random",
    type=click.IntRange(0),
    default=16,
    show_default=True,
    help="Random calls behind the fixed ones.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random calls.")
@click.option("--op", "ops", multiple=True, metavar="OP", help="Only this operation; may be given again.")
@click.option(
    "--require",
    callback=_parse_names,
    metavar="NAME[,NAME…]",
    help="Fail where one of these implementations cannot run.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto is the GPU where there is one.",
)
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="Processes on a CPU.")
@click.option("--brief", "is_brief", is_flag=True, help="The worst of each operation, and all that is wrong.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write every figure of every call here."
)
def cross(
    num_random: int,
    seed: int,
    ops: tuple[str, ...],
    require: tuple[str, ...],
    device: str,
    workers: int,
    is_brief: bool,
    json_path: Path | None,
) -> None:
    """Run every operation through Triton, CUDA (scalar and mma) and torch, and compare all pairs.

    On a CPU Triton's kernels run in its interpreter and the CUDA kernels in a checking runtime. The last line
    is a JSON object. The status is 1 where anything is over its tolerance, fails, or is required and missing.
    """
    from astrai_bench.cross_cases import CROSS_OPS, draw_cross_cases, list_cross_cases

    for op in ops:
        if op not in CROSS_OPS:
            raise click.UsageError(f"--op: wanted one of {', '.join(CROSS_OPS)}, got {op!r}")
    cases = [
        case
        for case in (*list_cross_cases(), *draw_cross_cases(num_random, seed))
        if not ops or case.op in ops
    ]
    place = _choose_device(device)
    report = _run(cases, place, require, workers if place.type == "cpu" else 1, seed, num_random)
    _show(report, is_brief=is_brief, json_path=json_path)
    if report.is_wrong:
        raise click.ClickException(_explain(report))


def _choose_device(name: str) -> torch.device:
    import torch

    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise click.UsageError("--device: wanted a GPU that torch can use, got cuda but there is none")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def _run(
    cases: Sequence[CrossCase],
    device: torch.device,
    require: tuple[str, ...],
    workers: int,
    seed: int,
    num_random: int,
) -> CrossReport:
    from astrai_bench.cross_providers import choose_interpreter, list_cross_providers

    # Importing the kernels decides between compiler and interpreter.
    choose_interpreter(device)
    from astrai_bench.cross_report import CrossReport
    from astrai_bench.cross_run import find_availability, run_cases
    from astrai_bench.machine import describe_machine

    availability = find_availability(list_cross_providers(), device)
    ready = [entry.provider for entry in availability if entry.status == "ready"]
    results = _collect(cases, run_cases(cases, ready, device, workers=workers))
    return CrossReport(
        machine=describe_machine(device),
        seed=seed,
        num_random=num_random,
        availability=tuple(availability),
        missing=tuple(name for name in require if name not in ready),
        results=tuple(results),
    )


def _collect(cases: Sequence[CrossCase], results: Iterator[CaseResult]) -> list[CaseResult]:
    from rich.console import Console
    from rich.progress import track

    is_silent = not sys.stderr.isatty()
    bar = track(
        results,
        total=len(cases),
        description="calls",
        console=Console(stderr=True),
        transient=True,
        disable=is_silent,
    )
    return list(bar)


def _show(report: CrossReport, *, is_brief: bool, json_path: Path | None) -> None:
    from rich.console import Console

    from astrai_bench.cross_report import build_cross_document, build_cross_lines, build_cross_table

    for line in build_cross_lines(report):
        click.echo(line)
    table = build_cross_table(report, is_brief=is_brief)
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False).print(table)
    if json_path is not None:
        document = build_cross_document(report, is_whole=True)
        try:
            json_path.write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"--json: {error}") from error
    click.echo(json.dumps(build_cross_document(report, is_whole=False), allow_nan=False))


def _explain(report: CrossReport) -> str:
    reasons = {entry.provider: entry.reason for entry in report.availability}
    parts = [f"required but missing: {name} ({reasons[name]})" for name in report.missing]
    parts += [
        f"{entry.provider}: {entry.reason}" for entry in report.availability if entry.status == "failed"
    ]
    if report.wrong:
        parts.append(f"{len(report.wrong)} of {len(report.results)} calls are wrong, see the table")
    return "; ".join(parts) or "nothing was compared: no implementation can run"
