"""``astrai bench decode`` and its like: options and output; torch is imported once the options are right."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import click

from astrai_bench.cases import ALIASES, ITEMSIZE, PROVIDERS, Op, Request, make_case
from astrai_bench.errors import BenchError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from astrai_bench.cases import Case
    from astrai_bench.measure import Report

_Command = TypeVar("_Command", bound=Callable[..., Any])
_PIPE_WIDTH = 200
"""A table cut to the width of a pipe would be of no use to what reads it."""


def _parse_lengths(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """``"512,70"`` -> ``(512, 70)``."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise click.BadParameter(f"wanted a length, or several with commas between, got {value!r}")
    return tuple(int(part) for part in parts)


@attrs.frozen(kw_only=True)
class Output:
    """How to run and where results go."""

    backends: tuple[str, ...]
    device: str
    repeats: int
    json_path: Path | None
    plot_path: Path | None
    compare: tuple[Path, Path] | None


def _add_options(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_SHAPE = _add_options(
    click.option("--batch", type=click.IntRange(1), help="Requests.  [default: by device]"),
    click.option("--heads", type=click.IntRange(1), default=32, show_default=True, help="Query heads."),
    click.option("--kv-heads", type=click.IntRange(1), default=8, show_default=True, help="KV heads."),
    click.option(
        "--head-dim", type=click.IntRange(1), default=128, show_default=True, help="Elements of a head."
    ),
    click.option(
        "--dtype",
        type=click.Choice([*ITEMSIZE, *ALIASES]),
        default="bfloat16",
        show_default=True,
        help="Of q, K and V.",
    ),
)
_Q_LEN = click.option(
    "--q-len", callback=_parse_lengths, metavar="N[,N…]", help="Rows per request.  [default: by device]"
)
_KV_LEN = click.option(
    "--kv-len",
    callback=_parse_lengths,
    metavar="N[,N…]",
    help="Keys per request, its rows included.  [default: by device]",
)
_PAGE = click.option(
    "--page", type=click.IntRange(1), default=1, show_default=True, help="Tokens per page of the pool."
)
_OUTPUT = _add_options(
    click.option(
        "--backend",
        multiple=True,
        type=click.Choice(PROVIDERS),
        help="Only this provider; may be given again.",
    ),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:1."),
    click.option(
        "--repeats",
        type=click.IntRange(1),
        default=20,
        show_default=True,
        help="Samples; slow calls get fewer.",
    ),
    click.option(
        "--json", "json_path", type=click.Path(path_type=Path), help="Write the JSON object here, too."
    ),
    click.option(
        "--plot",
        "plot_path",
        type=click.Path(path_type=Path),
        help="Write a chart (.png, .svg, .pdf); needs matplotlib.",
    ),
    click.option(
        "--compare",
        type=click.Path(path_type=Path),
        nargs=2,
        metavar="A B",
        help="Run nothing; compare two results of this bench.",
    ),
)


@click.command(short_help="One new token per request over dense K and V.")
@_SHAPE
@_KV_LEN
@_OUTPUT
def decode(**options: Any) -> None:
    """Time decode attention over dense K and V: one row per request."""
    _run("decode", options)


@click.command(short_help="Causal prompts over dense K and V.")
@_SHAPE
@_Q_LEN
@_KV_LEN
@_OUTPUT
def prefill(**options: Any) -> None:
    """Time causal prefill attention over dense K and V."""
    _run("prefill", options)


@click.command("paged-decode", short_help="One new token per request over a KV pool.")
@_SHAPE
@_KV_LEN
@_PAGE
@_OUTPUT
def paged_decode(**options: Any) -> None:
    """Time decode attention over a KV pool, the new K and V appended in the call.

    Several lengths make a ragged batch.
    """
    _run("paged-decode", options)


@click.command("paged-prefill", short_help="Causal prompts over a KV pool.")
@_SHAPE
@_Q_LEN
@_KV_LEN
@_PAGE
@_OUTPUT
def paged_prefill(**options: Any) -> None:
    """Time causal prefill attention over a KV pool that holds K and V of the prompt already.

    Several lengths make a ragged batch. torch_native writes K and V once more, as it does in service.
    """
    _run("paged-prefill", options)


@click.command(short_help="Rotary embedding of q and k.")
@_SHAPE
@_Q_LEN
@_OUTPUT
def rotary(**options: Any) -> None:
    """Time rotary embedding of q and k, adjacent pairs, all of the head."""
    _run("rotary", options)


COMMANDS: tuple[click.Command, ...] = (decode, prefill, paged_decode, paged_prefill, rotary)


def _run(op: Op, options: dict[str, Any]) -> None:
    output = Output(
        backends=options["backend"],
        device=options["device"],
        repeats=options["repeats"],
        json_path=options["json_path"],
        plot_path=options["plot_path"],
        compare=options["compare"],
    )
    try:
        if output.plot_path is not None:
            from astrai_bench.plot import check_plotting

            check_plotting(output.plot_path)
        if output.compare is not None:
            _compare(op, output.compare, output)
        else:
            _measure(op, options, output)
    except BenchError as error:
        raise click.ClickException(str(error)) from error


def _measure(op: Op, options: dict[str, Any], output: Output) -> None:
    device = _parse_device(output.device)
    case = _make_case(op, options, device)
    report = _measure_with_bar(case, device, output)
    from astrai_bench.report import build_document, build_lines, build_table

    for line in build_lines(report):
        click.echo(line)
    _print_table(build_table(report))
    document = build_document(report)
    if output.plot_path is not None and any(row["status"] == "timed" for row in document["rows"]):
        _plot(op, [("this run", document)], output.plot_path)
    _emit(document, output)
    unfit = [row.label for row in report.rows if row.status in ("wrong", "failed")]
    if unfit:
        raise click.ClickException(f"wrong or failed, see the table: {', '.join(unfit)}")
    if not any(row.status == "timed" for row in report.rows):
        raise click.ClickException("no provider could be timed, see the table")


def _parse_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise click.UsageError(f"--device: wanted auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise click.UsageError(
                f"--device: wanted a GPU that torch can use, got {name!r} but there is none"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise click.UsageError(
                f"--device: wanted one of {torch.cuda.device_count()} GPUs, counted from 0, got {name!r}"
            )
    return device


def _make_case(op: Op, options: dict[str, Any], device: torch.device) -> Case:
    request = Request(
        op=op,
        batch=options["batch"],
        q_heads=options["heads"],
        kv_heads=options["kv_heads"],
        head_dim=options["head_dim"],
        q_lens=options.get("q_len"),
        kv_lens=options.get("kv_len"),
        dtype=options["dtype"],
        page=options.get("page", 1),
    )
    try:
        case, smaller = make_case(request, is_gpu=device.type == "cuda")
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if smaller:
        click.echo(f"on a CPU smaller than on a GPU where nothing was given: {', '.join(smaller)}")
    return case


def _measure_with_bar(case: Case, device: torch.device, output: Output) -> Report:
    # Slow to import, so only once the arguments are known to be right.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from astrai_bench.measure import run_bench
    from astrai_bench.providers import list_providers

    wanted = output.backends or PROVIDERS
    providers = [provider for provider in list_providers() if provider.name in wanted]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    is_silent = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_silent) as bars:
        bar = bars.add_task("starting", total=None)
        return run_bench(
            case,
            providers,
            device,
            repeats=output.repeats,
            asked_for=output.backends,
            progress=lambda text, done, total: bars.update(
                bar, description=text, completed=done, total=total
            ),
        )


def _compare(op: Op, paths: tuple[Path, Path], output: Output) -> None:
    from astrai_bench.compare import build_pair_document, build_pair_table, compare_documents, load_document

    documents = [load_document(path) for path in paths]
    for path, document in zip(paths, documents, strict=True):
        if document["bench"] != op:
            raise BenchError(f"{path}: wanted a result of {op}, got one of {document['bench']}")
    pairs = compare_documents(*documents)
    for name, path, document in zip("AB", paths, documents, strict=True):
        click.echo(f"{name}: {path}, {document['date']}, {document['machine']['name']}")
    _print_table(build_pair_table(pairs))
    if output.plot_path is not None:
        names = [f"{name}: {path.name}" for name, path in zip("AB", paths, strict=True)]
        _plot(op, list(zip(names, documents, strict=True)), output.plot_path)
    _emit(build_pair_document(paths, pairs), output)


def _print_table(table: Table) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False).print(table)


def _plot(op: Op, documents: list[tuple[str, dict[str, Any]]], path: Path) -> None:
    from astrai_bench.plot import plot_documents

    plot_documents(documents, f"astrai bench {op}", path)
    click.echo(f"chart: {path}")


def _emit(document: dict[str, Any], output: Output) -> None:
    """The JSON object to the file, and as the last line of stdout."""
    line = json.dumps(document, allow_nan=False)
    if output.json_path is not None:
        try:
            output.json_path.write_text(line + "\n", encoding="utf-8")
        except OSError as error:
            click.echo(line)
            raise BenchError(f"--json: {error}") from error
    click.echo(line)
