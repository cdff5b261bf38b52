"""``astrai bench cpu``: a model's forward on the CPU, our kernels beside the Decoder in torch."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from astrai_bench.errors import BenchError

if TYPE_CHECKING:
    from astrai_triton.cpu import CpuDecoder, Quantize
    from astrai_triton.model import Decoder

FORMAT = 1
_ROUNDS_MIN = 3


@attrs.frozen(kw_only=True)
class Case:
    """One shape of a step."""

    batch: int
    rows: int
    """New tokens of each request: 1 is decode, more is a prefill from position 0."""
    context: int
    """K/V tokens of each request with the new ones."""

    @property
    def name(self) -> str:
        """How tables call it."""
        if self.rows == 1:
            return f"decode {self.batch}, context {self.context}"
        return f"prefill {self.rows}"


@attrs.frozen(kw_only=True)
class StepTime:
    """A step's time: the shortest, which others on the machine disturb least, and the median."""

    case: str
    model: str
    min_ms: float
    median_ms: float
    tokens_per_s: float
    """Of the shortest."""
    weights_gb_per_s: float | None
    """Packed weights over the shortest time: what a decode step of few rows is bound by; None for torch."""
    phases_ms: dict[str, float]
    """Of the shortest of as many further rounds; empty for torch."""


@click.command(short_help="A model's forward on the CPU: our kernels and torch.")
@click.option("--model", "param_path", default="smollm2", show_default=True, help="As server.param_path.")
@click.option(
    "--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto", show_default=True
)
@click.option("--quantize", type=click.Choice(["none", "int8", "int4"]), default="none", show_default=True)
@click.option("--isa", default=None, help="Instruction set of the kernels; the fastest by default.")
@click.option("--context", type=click.IntRange(2), default=256, show_default=True, help="Of decode steps.")
@click.option(
    "--prompt", type=click.IntRange(2), default=1024, show_default=True, help="Rows of the prefill."
)
@click.option(
    "--rounds", type=click.IntRange(_ROUNDS_MIN), default=30, show_default=True, help="Of each case."
)
@click.option("--no-torch", is_flag=True, help="Leave the Decoder out.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also to a file.")
def cpu(
    param_path: str,
    dtype: str,
    quantize: Quantize,
    isa: Any,
    context: int,
    prompt: int,
    rounds: int,
    no_torch: bool,
    json_path: Path | None,
) -> None:
    """Time decode steps of 1 and 16 requests and a prefill, and say which phase takes what.

    Rounds of the two models take turns, so that both see the same machine. The last line is JSON.
    """
    import torch
    from rich.console import Console

    from astrai_bench.machine import describe_machine
    from astrai_triton.errors import AstraiError

    try:
        decoder = _load(param_path, dtype)
        from astrai_triton.cpu import CpuDecoder

        models: dict[str, Any] = {"kernels": CpuDecoder(decoder, quantize=quantize, isa=isa)}
    except (AstraiError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if not no_torch:
        models["torch"] = decoder
    cases = [Case(batch=batch, rows=1, context=context) for batch in (1, 16)]
    cases.append(Case(batch=1, rows=prompt, context=prompt))
    try:
        times = [step for case in cases for step in time_case(models, case, rounds)]
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    document = {
        "format": FORMAT,
        "machine": attrs.asdict(describe_machine(torch.device("cpu"))),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "quantize": quantize,
        "times": [attrs.asdict(step) for step in times],
    }
    _print(Console(), times)
    line = json.dumps(document, separators=(",", ":"))
    if json_path is not None:
        json_path.write_text(line + "\n", encoding="utf-8")
    click.echo(line)


def time_case(models: dict[str, Decoder | CpuDecoder], case: Case, rounds: int) -> list[StepTime]:
    """Time one step of every model, in turns, over the same tokens.

    Args:
        models: by the name they get in the result.
        case: the step.
        rounds: of each model, at least 3.

    Raises:
        BenchError: the logits of two models lie far apart: there is nothing to compare then.
    """
    import torch

    steps = {name: _prepare(model, case) for name, model in models.items()}
    logits = [step() for step in steps.values()]
    for other in logits[1:]:
        agreement = torch.nn.functional.cosine_similarity(logits[0], other, dim=-1).min().item()
        # int4 of weights that had more bits is about this far from its model.
        if not agreement > 0.8:
            raise BenchError(f"{case.name}: the models disagree, cosine of their logits {agreement:.2f}")
    seconds: dict[str, list[float]] = {name: [] for name in models}
    phases: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    for name, model in models.items():
        phases[name] = _time_phases(model, steps[name], rounds)
    return [_summarize(case, name, models[name], seconds[name], phases[name]) for name in models]


def _summarize(
    case: Case, name: str, model: Decoder | CpuDecoder, seconds: list[float], phases: list[float]
) -> StepTime:
    from astrai_triton.cpu import CpuDecoder, abi

    shortest = min(seconds)
    num_bytes = model.num_bytes if isinstance(model, CpuDecoder) else None
    return StepTime(
        case=case.name,
        model=name,
        min_ms=shortest * 1e3,
        median_ms=statistics.median(seconds) * 1e3,
        tokens_per_s=case.batch * case.rows / shortest,
        weights_gb_per_s=None if num_bytes is None else num_bytes / shortest / 1e9,
        phases_ms={phase: taken * 1e3 for phase, taken in zip(abi.PHASES, phases, strict=False)},
    )


def _time_phases(model: Decoder | CpuDecoder, step: Callable[[], Any], rounds: int) -> list[float]:
    from astrai_triton.cpu import CpuDecoder, abi

    if not isinstance(model, CpuDecoder):
        return []
    samples = []
    for _ in range(rounds):
        model.phase_seconds = [0.0] * len(abi.PHASES)
        step()
        samples.append(model.phase_seconds)
    model.phase_seconds = None
    return min(samples, key=sum)


def _prepare(model: Decoder | CpuDecoder, case: Case) -> Callable[[], Any]:
    """The step over a pool of its own, the tokens before it already in it."""
    import torch

    from astrai_triton.cache import PagePool

    config = model.config
    pool = PagePool(
        n_layers=config.n_layers,
        n_q_heads=config.n_q_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        max_batch_size=case.batch,
        max_seq_len=case.context,
        max_step_tokens=max(case.batch * case.rows, case.context),
        dtype=model.dtype,
    )
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, config.vocab_size, (case.batch, case.context), generator=generator)
    leases = [pool.open(row) for row in tokens.tolist()]
    held = [lease for lease in leases if lease is not None]
    before = case.context - case.rows
    # Keys as a model makes them: from random ones, rounding would grow until no two models agree.
    for i in range(case.batch if before else 0):
        cache = pool.bind_tasks([held[i]], [before], [before])
        with torch.inference_mode():
            model(tokens[i, :before].contiguous(), torch.arange(before), cache, torch.tensor([before - 1]))
    cache = pool.bind_tasks(held, [case.rows] * case.batch, [case.context] * case.batch)
    token_ids = tokens[:, before:].flatten().contiguous()
    positions = torch.arange(before, case.context).repeat(case.batch)
    rows = torch.arange(1, case.batch + 1) * case.rows - 1

    def step() -> Any:
        with torch.inference_mode():
            return model(token_ids, positions, cache, rows)

    return step


def _load(param_path: str, dtype: str) -> Decoder:
    import torch

    from astrai_triton.checkpoint import open_checkpoint, resolve
    from astrai_triton.model import Decoder, choose_dtype

    files = open_checkpoint(resolve(param_path))
    chosen = choose_dtype("cpu") if dtype == "auto" else getattr(torch, dtype)
    decoder = Decoder(files.config, dtype=chosen, device="cpu")
    decoder.load_weights(files.tensors())
    return decoder


def _print(console: Any, times: list[StepTime]) -> None:
    from rich.table import Table

    table = Table(box=None)
    for column in ("step", "model", "min ms", "median ms", "tok/s", "GB/s of weights"):
        table.add_column(column, justify="left" if column in ("step", "model") else "right")
    for step in times:
        gb = "" if step.weights_gb_per_s is None else f"{step.weights_gb_per_s:.1f}"
        table.add_row(
            step.case,
            step.model,
            f"{step.min_ms:.2f}",
            f"{step.median_ms:.2f}",
            f"{step.tokens_per_s:.0f}",
            gb,
        )
    console.print(table)
    for step in times:
        if step.phases_ms:
            parts = ", ".join(f"{name} {taken:.2f}" for name, taken in step.phases_ms.items())
            console.print(f"{step.case}: {parts} ms")
