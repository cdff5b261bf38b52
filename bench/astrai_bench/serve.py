"""``astrai bench serve``: load on any server that speaks OpenAI's or Anthropic's protocol."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from astrai_bench.errors import BenchError
from astrai_bench.plot import check_plotting

if TYPE_CHECKING:
    from astrai_bench.load import Load, Run
    from astrai_bench.protocols import Answer


@click.command(short_help="Load on a running server: latencies, throughput, failures.")
@click.argument("url")
@click.option(
    "--protocol",
    type=click.Choice(["chat", "completions", "anthropic"]),
    default="chat",
    show_default=True,
    help="OpenAI's chat or completions, or Anthropic's messages.",
)
@click.option("--model", help="Model to name in requests.  [default: the server's first]")
@click.option(
    "--clients", type=click.IntRange(1), help="Closed loop: so many ask, one request each.  [default: 8]"
)
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), help="Open loop: requests a second (Poisson)."
)
@click.option(
    "--num-requests", type=click.IntRange(1), default=64, show_default=True, help="Requests measured."
)
@click.option(
    "--warmup", type=click.IntRange(0), default=4, show_default=True, help="Requests before, not counted."
)
@click.option(
    "--input-tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens of a prompt."
)
@click.option(
    "--prompts", type=click.Path(dir_okay=False, path_type=Path), help="JSONL of prompts to send instead."
)
@click.option(
    "--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens of an answer."
)
@click.option(
    "--ignore-eos", is_flag=True, help="Every answer has --max-tokens (servers that know ignore_eos)."
)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="Of sampling.")
@click.option("--seed", type=int, help="Of prompts and arrivals.  [default: another each time]")
@click.option(
    "--timeout", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds of a request."
)
@click.option("--api-key", envvar=["ASTRAI_API_KEY", "OPENAI_API_KEY"], help="Sent with every request.")
@click.option(
    "--slo-ttft-ms", type=click.FloatRange(0, min_open=True), help="Count requests that begin within this."
)
@click.option(
    "--max-error-share",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Exit with 1 when a larger share failed.",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Chart to write (.png, .svg, .pdf)."
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also to a file.")
def serve(
    url: str,
    plot: Path | None,
    json_path: Path | None,
    slo_ttft_ms: float | None,
    max_error_share: float,
    **options: Any,
) -> None:
    """Stream from the server at URL and report latencies (p50, p90, p99), throughput and failures.

    With --clients each client sends its next request when it has its answer; with --rate requests are sent at
    random moments whether or not the server keeps up. Prompts are random words that no prefix cache knows,
    as many as make --input-tokens by the server's own count. Tokens are the server's count (usage) where it
    gives one, else chunks. The CPU time of this client is reported, since it shares the machine with a local
    server. The last line is JSON. Exit status 1: more than --max-error-share failed.
    """
    from rich.console import Console

    from astrai_bench.serve_report import build_document, build_table, describe_lines

    console = Console()
    if plot is not None:
        check_plotting(plot)
    load = build_load(url, **options)
    run = _run(load)
    document = build_document(load, run, slo_ttft_ms=slo_ttft_ms)
    console.print(build_table(document))
    for line in describe_lines(document):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if plot is not None and document["requests"]["answered"]:
        from astrai_bench.serve_plot import plot_run

        plot_run(run, f"{document['load']['model']} at {url}", plot)
    text = json.dumps(document, separators=(",", ":"))
    if json_path is not None:
        json_path.write_text(text + "\n", encoding="utf-8")
    click.echo(text)
    if document["requests"]["failed"] > max_error_share * document["requests"]["sent"]:
        sys.exit(1)


def build_load(
    url: str,
    *,
    protocol: str,
    model: str | None,
    clients: int | None,
    rate: float | None,
    num_requests: int,
    warmup: int,
    input_tokens: int,
    prompts: Path | None,
    max_tokens: int,
    ignore_eos: bool,
    temperature: float,
    seed: int | None,
    timeout: float,
    api_key: str | None,
) -> Load:
    """The load that the options of the command ask for.

    Raises:
        BenchError: options contradict each other, a file of prompts is no such file, a package is missing, or
            the server does not tell its model.
    """
    try:
        from astrai_bench.load import Load
        from astrai_bench.prompts import read_prompts
        from astrai_bench.protocols import Question, find_protocol
    except ImportError as error:
        raise BenchError(f"serve: {error}; install astrai-triton[serve]") from error

    if clients is not None and rate is not None:
        raise BenchError("--clients and --rate: wanted one of them (a closed or an open loop), got both")
    found = find_protocol(protocol)
    if ignore_eos and not found.knows_ignore_eos:
        raise BenchError(f"--ignore-eos: the protocol {protocol} has no such field; use chat or completions")
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise BenchError(f"URL: wanted http://HOST:PORT, got {url!r}")
    return Load(
        url=base,
        protocol=found,
        question=Question(
            model=model or find_model(base, found.headers(api_key)),
            max_tokens=max_tokens,
            temperature=temperature,
            ignore_eos=ignore_eos,
        ),
        num_requests=num_requests,
        num_warmup=warmup,
        input_tokens=input_tokens,
        prompts=read_prompts(prompts) if prompts is not None else (),
        clients=None if rate is not None else clients or 8,
        rate=rate,
        # A server that has seen a seed's prompts would answer from its cache.
        seed=secrets.randbits(32) if seed is None else seed,
        timeout_s=timeout,
        api_key=api_key,
    )


def find_model(url: str, headers: dict[str, str]) -> str:
    """The first model that the server lists.

    Raises:
        BenchError: the server cannot be reached, or lists none.
    """
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{url}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BenchError(
            f"{url}/v1/models: wanted a list of models, got {type(error).__name__}: {error}; "
            "is the server running? --model names one without asking"
        ) from error


def _run(load: Load) -> Run:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from astrai_bench.load import run_load

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
        refresh_per_second=4,
    )
    with bar:
        task = bar.add_task("prompts and warm-up", total=load.num_requests)

        def tell(answers: Sequence[Answer], num_done: int) -> None:
            if bar.disable:
                return
            failed = sum(answer.error is not None for answer in answers)
            description = f"{len(answers) - num_done} open, {failed} failed"
            bar.update(task, completed=num_done, description=description)

        return asyncio.run(run_load(load, tell))
