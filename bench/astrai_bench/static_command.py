"""``astrai bench static``: what the compiler makes of every kernel, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import attrs
import click

from astrai_bench.cases import ALIASES, ITEMSIZE, Request, make_case

if TYPE_CHECKING:
    from collections.abc import Sequence

    from astrai_bench.static import KernelReport

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
_EXPLAINED = ("decode", "prefill", "paged-decode", "paged-prefill")
# A table cut to the width of a pipe would be of no use to what reads it.
_PIPE_WIDTH = 200
# Each has torch and a compiler in memory, about half a gigabyte.
_MOST_WORKERS = 8


@click.command(short_help="Compile every kernel without a GPU: registers, spills, occupancy, MMA.")
@click.option(
    "--arch",
    "arches",
    type=click.Choice(ARCHES),
    multiple=True,
    help="Architecture; may be given again. [all; sm_90 with --explain]",
)
@click.option(
    "--variant", "globs", multiple=True, metavar="GLOB", help="Only variants that match; may be given again."
)
@click.option("--check", is_flag=True, help="Show only what is wrong; status 1 if anything is.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
@click.option("--workers", type=click.IntRange(1), help="Compiling processes. [one a CPU, at most 8]")
@click.option(
    "--explain", type=click.Choice(_EXPLAINED), help="Show one call instead: grid, waves, roofline."
)
@click.option("--batch", type=click.IntRange(1), help="Requests of the call. [16 for decode, 1 or 4]")
@click.option("--heads", type=click.IntRange(1), default=32, show_default=True, help="Its query heads.")
@click.option("--kv-heads", type=click.IntRange(1), default=8, show_default=True, help="Its KV heads.")
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True, help="Per head.")
@click.option("--q-len", type=click.IntRange(1), help="Rows per request. [1 for decode, 8192 or 2048]")
@click.option("--kv-len", type=click.IntRange(1), help="Keys per request. [4096 for decode, else q-len]")
@click.option(
    "--dtype",
    type=click.Choice([*ITEMSIZE, *ALIASES]),
    default="bfloat16",
    show_default=True,
    help="Of q, k and v.",
)
def static(
    arches: tuple[str, ...],
    globs: tuple[str, ...],
    check: bool,
    as_json: bool,
    workers: int | None,
    explain: str | None,
    **shape: Any,
) -> None:
    """Compile every variant of every kernel and show what came of it.

    --check refuses spills, more shared memory than the architecture has, products of 16-bit tiles without
    matrix instructions (without wgmma from 64 rows on sm_90), fewer tiles in flight than stages - 1, decode
    with fewer than 2 tiles or, on sm_90, 32 KB a multiprocessor in flight, and address products that may
    overflow 32 bits.
    """
    capabilities = [int(name.removeprefix("sm_")) for name in ARCHES if not arches or name in arches]
    if explain is not None:
        if check or globs:
            raise click.UsageError("--explain shows one call; leave out --check and --variant")
        _explain(explain, capabilities if arches else [90], as_json, shape)
        return
    reports = _collect(globs or ("*",), capabilities, workers or min(os.cpu_count() or 1, _MOST_WORKERS))
    _show(reports, is_check=check, as_json=as_json)


def _collect(globs: Sequence[str], capabilities: Sequence[int], workers: int) -> list[KernelReport]:
    # Slow to import, so only once the arguments are known to be right.
    from rich.console import Console
    from rich.progress import Progress

    from astrai_bench.compilation import collect_reports

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("compiling", total=None)

        def advance(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        return collect_reports(globs, capabilities, num_workers=workers, on_progress=advance)


def _show(reports: list[KernelReport], *, is_check: bool, as_json: bool) -> None:
    """Write the table, or the document, and the faults.

    Raises:
        Exit: with status 1, on a fault in a check.
    """
    from rich.console import Console

    from astrai_bench.static_table import build_table, list_faults

    if as_json:
        click.echo(json.dumps([attrs.asdict(report) for report in reports]))
    elif not is_check:
        Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(build_table(reports))
    faults = list_faults(reports)
    for line in faults:
        click.echo(line, err=as_json)
    num_variants = len({report.variant for report in reports})
    click.echo(
        f"{num_variants} variants, {len(reports)} kernels, Triton {reports[0].triton}, "
        f"faults: {len(faults) or 'none'}",
        err=as_json,
    )
    if is_check and faults:
        raise click.exceptions.Exit(1)


def _explain(op: Any, capabilities: Sequence[int], as_json: bool, shape: dict[str, Any]) -> None:
    from astrai_bench.explain import describe_explanation, explain_case

    request = Request(
        op=op,
        batch=shape["batch"],
        q_heads=shape["heads"],
        kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        q_lens=None if shape["q_len"] is None else (shape["q_len"],),
        kv_lens=None if shape["kv_len"] is None else (shape["kv_len"],),
        dtype=shape["dtype"],
    )
    try:
        case, _ = make_case(request, is_gpu=True)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    explanations = [explain_case(case, capability) for capability in capabilities]
    if as_json:
        click.echo(json.dumps([attrs.asdict(explanation) for explanation in explanations]))
        return
    for explanation in explanations:
        click.echo(f"{explanation.arch}: " + "\n".join(describe_explanation(explanation)))
