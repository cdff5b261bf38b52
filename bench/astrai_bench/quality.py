"""``astrai bench quality``: what a smaller type costs, in perplexity and in divergence from float32."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from astrai_bench.errors import BenchError

if TYPE_CHECKING:
    from astrai_triton.cpu import Quantize

FORMAT = 1
REFERENCE = "float32"
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED = ("int8", "int4")


@click.command(short_help="Perplexity, and divergence of a dtype from float32.")
@click.argument("model", default="SmolLM2-135M-Instruct")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(DTYPES),
    default=("bfloat16",),
    show_default=True,
    help="Type of weights, activations, K and V; repeatable. float32 is always run.",
)
@click.option(
    "--quantize",
    "quantized",
    multiple=True,
    type=click.Choice(QUANTIZED),
    help="Weights of the CPU kernels, beside activations, K and V in bfloat16; repeatable.",
)
@click.option(
    "--text", type=click.Path(dir_okay=False, path_type=Path), help="UTF-8 file instead of Python's manual."
)
@click.option("--context", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a window.")
@click.option(
    "--windows", type=click.IntRange(1), default=8, show_default=True, help="Windows, spread over the text."
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: torch's choice]")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also to a file.")
def quality(
    model: str,
    dtypes: Sequence[str],
    quantized: Sequence[Quantize],
    text: Path | None,
    context: int,
    windows: int,
    threads: int | None,
    json_path: Path | None,
) -> None:
    """Let MODEL predict a text in float32 and in other types, on the CPU, and compare.

    With --quantize MODEL runs in the CPU kernels as in a server: half of a window is one prefill, what
    follows is decoded token by token.

    The text is the reference manual inside Python, so that nothing is fetched; its hash is part of the
    result, since it changes with Python. Reported are perplexity, how often the likeliest token is that of
    float32, and the Kullback-Leibler divergence from float32 in nats. The same arguments give the same
    figures on the same machine. The last line is JSON.
    """
    from rich.console import Console

    from astrai_bench.quality_text import load_manual, read_text

    chosen = load_manual() if text is None else read_text(text)
    document = measure_quality(model, dtypes, quantized, chosen, context, windows, threads)
    Console().print(build_table(document))
    line = json.dumps(document, separators=(",", ":"))
    if json_path is not None:
        json_path.write_text(line + "\n", encoding="utf-8")
    click.echo(line)


def measure_quality(
    name: str,
    dtypes: Sequence[str],
    quantized: Sequence[Quantize],
    text: Any,
    context: int,
    num_windows: int,
    threads: int | None,
) -> dict[str, Any]:
    """The JSON object of a run; ``text`` is a ``quality_text.Text``.

    Raises:
        BenchError: a window is longer than the model's context, the text is too short, or a package is
            missing, or the CPU kernels cannot run the model.
        AstraiError: the model cannot be found or loaded.
    """
    import attrs
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from astrai_bench.divergence import compare_models
    from astrai_bench.machine import describe_machine
    from astrai_bench.quality_text import cut_windows

    try:
        from astrai_triton.checkpoint import open_checkpoint, resolve
    except ImportError as error:
        raise BenchError(f"quality: {error}; install astrai-triton[serve]") from error

    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint = open_checkpoint(resolve(name))
    if context > checkpoint.config.max_seq_len:
        raise BenchError(
            f"--context: wanted at most {checkpoint.config.max_seq_len} (the model's), got {context}"
        )
    token_ids = checkpoint.tokenizer.encode(text.content, add_bos=False)
    pieces = cut_windows(token_ids, context, num_windows)
    models = {dtype: load_model(checkpoint, dtype) for dtype in dict.fromkeys((REFERENCE, *dtypes))}
    models |= {quantize: load_quantized(checkpoint, quantize) for quantize in dict.fromkeys(quantized)}
    with Progress(transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        for tallies in bar.track(compare_models(models, REFERENCE, pieces), total=num_windows):
            found = tallies
    return {
        "format": FORMAT,
        "bench": "quality",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": attrs.asdict(describe_machine(torch.device("cpu"))),
        "model": checkpoint.name,
        "text": {"source": text.source, "sha256": text.sha256, "tokens": len(token_ids)},
        "context": context,
        "windows": num_windows,
        "predicted": found[REFERENCE].num_tokens,
        "rows": [{**describe_row(name), **tally.summarize()} for name, tally in found.items()],
    }


def load_model(checkpoint: Any, dtype: str) -> Any:
    """The engine's model of a ``Checkpoint`` in a dtype, on the CPU."""
    import torch

    from astrai_triton.model import Decoder

    model = Decoder(checkpoint.config, dtype=getattr(torch, dtype), device="cpu")
    model.load_weights(checkpoint.tensors())
    return model


def load_quantized(checkpoint: Any, quantize: Quantize) -> Any:
    """The CPU kernels with such weights, stepped through a window as a server would.

    Raises:
        BenchError: they cannot run the model, or not here.
    """
    from astrai_bench.divergence import PrefillDecode
    from astrai_triton.cpu import CpuDecoder, why_not

    decoder = load_model(checkpoint, "bfloat16")
    reason = why_not(decoder, quantize=quantize)
    if reason is not None:
        raise BenchError(f"--quantize {quantize}: {reason}")
    return PrefillDecode(CpuDecoder(decoder, quantize=quantize, release=True))


def describe_row(name: str) -> dict[str, str]:
    """What a row of the result is of: dtype and type of weights."""
    return (
        {"dtype": "bfloat16", "quantize": name} if name in QUANTIZED else {"dtype": name, "quantize": "none"}
    )


def build_table(document: dict[str, Any]) -> Any:
    """One line per model."""
    from rich.table import Table

    table = Table(
        title=f"{document['model']}, {document['predicted']} tokens of {document['text']['source']}"
    )
    table.add_column("model", no_wrap=True)
    for name in ("perplexity", "±", "first choice as float32", "KL mean", "KL p99", "KL max"):
        table.add_column(name, justify="right")
    for row in document["rows"]:
        table.add_row(
            row["dtype"] if row["quantize"] == "none" else row["quantize"],
            f"{row['perplexity']:.4f}",
            f"{row['perplexity_error']:.2f}",
            f"{row['top1_agreement']:.2%}",
            *(f"{row[name]:.2e}" for name in ("kl_mean", "kl_p99", "kl_max")),
        )
    return table
