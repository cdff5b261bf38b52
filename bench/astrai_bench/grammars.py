"""``astrai bench grammar``: what grammar engines understand, refuse and cost."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from astrai_bench.errors import BenchError
from astrai_bench.grammar_cases import CASES, SchemaCase
from astrai_bench.grammar_documents import DOCUMENTS
from astrai_bench.grammar_hostile import HOSTILE

FORMAT = 1
_LIMIT_S = 30.0
VERDICTS = ("right", "refused", "too strict", "too lax")


@click.command("grammar", short_help="What grammar engines understand of JSON Schema, and what they cost.")
@click.option("--model", default="SmolLM2-135M-Instruct", show_default=True, help="Whose vocabulary.")
@click.option("--bytes", "of_bytes", is_flag=True, help="A vocabulary of single bytes, without any model.")
@click.option("--no-hostile", is_flag=True, help="Leave out schemas that may end a process.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also to a file.")
def grammar(model: str, of_bytes: bool, no_hostile: bool, json_path: Path | None) -> None:
    """Compare our grammars with the bare engines, over hand-written schemas, valid and invalid values.

    An engine is right about a schema if it accepts every valid value and no invalid one; it may refuse the
    schema, which is honest; it is too strict if a valid value is lost, and too lax if an invalid one passes.
    Times are CPU time of one thread; a mask is timed at every token of documents as models write them, the
    first time over a fresh grammar (cold) and then again (warm). Hostile schemas are compiled in a process of
    their own. xgrammar takes part where it is installed. The last line is JSON.
    """
    from rich.console import Console

    console = Console(stderr=False)
    try:
        document = _measure(console, None if of_bytes else model, with_hostile=not no_hostile)
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    _print(console, document)
    line = json.dumps(document, separators=(",", ":"))
    if json_path is not None:
        json_path.write_text(line + "\n", encoding="utf-8")
    click.echo(line)


@attrs.frozen
class Coverage:
    """What one engine makes of one schema.

    Args:
        case: its name.
        verdict: one of ``VERDICTS``.
        detail: the reason of a refusal, or the first value that was judged wrongly.
        compile_ms: CPU time until the schema was ready or refused.
    """

    case: str
    verdict: str
    detail: str
    compile_ms: float


class ByteVocabulary:
    """A token for every byte, and one that ends an answer."""

    vocab_size = 257
    stop_ids = frozenset({256})
    special_tokens = {"<|end|>": 256}

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return list(text.encode())


def judge_case(
    compile_schema: Callable[[Any], Any], encode: Callable[[str], list[int]], case: SchemaCase
) -> Coverage:
    """Compile one schema and try its values."""
    from astrai_bench.grammar_engines import RefusedError

    begin = time.process_time()
    try:
        start = compile_schema(case.schema)
    except RefusedError as refusal:
        return Coverage(case.name, "refused", str(refusal), (time.process_time() - begin) * 1e3)
    compile_ms = (time.process_time() - begin) * 1e3
    if not case.valid:
        return Coverage(case.name, "too lax", "taken, though there is nothing to write", compile_ms)
    forbidden = [*map(_write, case.invalid), *case.invalid_texts]
    lax = [text for text in forbidden if accepts(start(), encode(text))]
    strict = [text for text in map(_write, case.valid) if not accepts(start(), encode(text))]
    verdict = "too lax" if lax else "too strict" if strict else "right"
    return Coverage(case.name, verdict, (lax or strict or [""])[0], compile_ms)


def accepts(walk: Any, token_ids: Sequence[int]) -> bool:
    """Whether an answer may consist of exactly these tokens."""
    return all(walk.accept(token_id) for token_id in token_ids) and bool(walk.may_end())


@attrs.frozen
class MaskTimes:
    """CPU time of masks at the tokens of the documents, in microseconds."""

    num_tokens: int
    cold_p50_us: float
    cold_p99_us: float
    warm_p50_us: float
    warm_p99_us: float
    warm_max_us: float
    accept_p50_us: float


def time_masks(
    compile_schema: Callable[[Any], Any], encode: Callable[[str], list[int]], *, rounds: int = 20
) -> MaskTimes:
    """Walk documents token by token, compact and indented; warm times are medians over ``rounds``."""
    cold: list[float] = []
    warm: list[list[float]] = []
    accepting: list[float] = []
    for _, schema, value in DOCUMENTS:
        start = compile_schema(schema)
        for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, indent=2)):
            token_ids = encode(text)
            passes = [_time_walk(start(), token_ids) for _ in range(rounds + 1)]
            cold += [fill for fill, _ in passes[0]]
            for step in range(len(token_ids)):
                warm.append([times[step][0] for times in passes[1:]])
                accepting += [times[step][1] for times in passes[1:]]
    medians = [_quantile(times, 0.5) for times in warm]
    return MaskTimes(
        num_tokens=len(medians),
        cold_p50_us=_quantile(cold, 0.5),
        cold_p99_us=_quantile(cold, 0.99),
        warm_p50_us=_quantile(medians, 0.5),
        warm_p99_us=_quantile(medians, 0.99),
        warm_max_us=max(medians),
        accept_p50_us=_quantile(accepting, 0.5),
    )


def _time_walk(walk: Any, token_ids: Sequence[int]) -> list[tuple[float, float]]:
    times = []
    for token_id in token_ids:
        begin = time.thread_time_ns()
        walk.fill()
        middle = time.thread_time_ns()
        is_legal = walk.accept(token_id)
        times.append(((middle - begin) / 1e3, (time.thread_time_ns() - middle) / 1e3))
        if not is_legal:
            raise BenchError(f"token {token_id}, number {len(times)} of a document, is refused")
    return times


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@attrs.frozen
class HostileResult:
    """What became of a hostile schema.

    Args:
        case: its name.
        outcome: taken, refused, killed after the time limit, or died with a signal.
        seconds: CPU time until then.
        peak_mib: greatest resident memory of the process, the engine's own vocabulary included.
    """

    case: str
    outcome: str
    seconds: float
    peak_mib: float


def try_hostile(
    build: Callable[[], Any], name: str, schema: Any, *, limit_s: float = _LIMIT_S
) -> HostileResult:
    """Compile a schema in a forked process and fill the first mask."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_compile_hostile, args=(build, schema, sender), daemon=True)
    process.start()
    sender.close()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        return HostileResult(name, f"killed after {limit_s:.0f} s", limit_s, 0.0)
    if process.exitcode != 0 or not receiver.poll():
        return HostileResult(name, f"the process died ({process.exitcode})", 0.0, 0.0)
    outcome, seconds, peak_mib = receiver.recv()
    return HostileResult(name, outcome, seconds, peak_mib)


def _compile_hostile(build: Callable[[], Any], schema: Any, sender: Any) -> None:
    import resource

    from astrai_bench.grammar_engines import RefusedError

    compile_schema = build()
    begin = time.process_time()
    try:
        compile_schema(schema)().fill()
        outcome = "taken"
    except RefusedError:
        outcome = "refused"
    # ru_maxrss counts KiB on Linux.
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sender.send((outcome, time.process_time() - begin, peak_mib))


def _measure(console: Any, model: str | None, *, with_hostile: bool) -> dict[str, Any]:
    import torch
    from rich.progress import Progress

    from astrai_bench.grammar_engines import build_engines
    from astrai_bench.machine import describe_machine

    tokenizer = _load_tokenizer(model)
    engines = build_engines(tokenizer)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_bos=False))

    measured: dict[str, Any] = {}
    with Progress(transient=True, console=console, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("grammar", total=len(engines) * 3)
        for name, build in engines.items():
            # Before this process has threads that a fork would lose.
            hostile = [try_hostile(build, case, schema) for case, schema in HOSTILE] if with_hostile else []
            progress.advance(bar)
            compile_schema = build()
            cases = [judge_case(compile_schema, encode, case) for case in CASES]
            progress.advance(bar)
            masks = time_masks(compile_schema, encode)
            progress.advance(bar)
            measured[name] = {
                "cases": [attrs.asdict(case) for case in cases],
                "masks": attrs.asdict(masks),
                "hostile": [attrs.asdict(result) for result in hostile],
            }
    return {
        "format": FORMAT,
        "bench": "grammar",
        "machine": attrs.asdict(describe_machine(torch.device("cpu"))),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "vocabulary": {"model": model, "size": tokenizer.vocab_size},
        "engines": measured,
    }


def _load_tokenizer(model: str | None) -> Any:
    if model is None:
        return ByteVocabulary()
    from astrai_triton.checkpoint import open_checkpoint, resolve
    from astrai_triton.errors import CheckpointError

    try:
        return open_checkpoint(resolve(model)).tokenizer
    except CheckpointError as error:
        raise BenchError(str(error)) from error


def _print(console: Any, document: dict[str, Any]) -> None:
    from rich.table import Table

    engines = document["engines"]
    table = Table(title="schemas by verdict; compile and masks in CPU time")
    for column in (
        "engine",
        *VERDICTS,
        "compile ms p50",
        "p99",
        "mask µs cold p50",
        "p99",
        "warm p50",
        "p99",
        "accept",
    ):
        table.add_column(column, justify="right")
    for name, engine in engines.items():
        counts = Counter(case["verdict"] for case in engine["cases"])
        compiles = [case["compile_ms"] for case in engine["cases"]]
        masks = engine["masks"]
        times = [_quantile(compiles, 0.5), _quantile(compiles, 0.99)]
        times += [
            masks[key]
            for key in ("cold_p50_us", "cold_p99_us", "warm_p50_us", "warm_p99_us", "accept_p50_us")
        ]
        table.add_row(
            name,
            *(str(counts[verdict]) for verdict in VERDICTS),
            *(f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in times),
        )
    console.print(table)
    table = Table(title="schemas about which the engines differ from right")
    table.add_column("schema")
    for name in engines:
        table.add_column(name)
    for row in zip(*(engine["cases"] for engine in engines.values()), strict=True):
        if any(case["verdict"] != "right" for case in row):
            table.add_row(row[0]["case"], *(_describe(case) for case in row))
    console.print(table)
    if any(engine["hostile"] for engine in engines.values()):
        table = Table(title="hostile schemas, each in a process of its own")
        table.add_column("schema")
        for name in engines:
            table.add_column(name)
        for results in zip(*(engine["hostile"] for engine in engines.values()), strict=True):
            cells = [f"{r['outcome']}, {r['seconds'] * 1e3:.0f} ms, {r['peak_mib']:.0f} MiB" for r in results]
            table.add_row(results[0]["case"], *cells)
        console.print(table)


def _describe(case: dict[str, Any]) -> str:
    if case["verdict"] in ("right", "refused"):
        return str(case["verdict"])
    return f"{case['verdict']}: {case['detail'][:40]}"


def _write(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
