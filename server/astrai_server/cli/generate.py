"""``astrai generate``: one answer on the terminal, without a server."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import click

from astrai_server.chat.control import ControlFilter
from astrai_server.cli.failure import debug_flag, is_debug
from astrai_server.cli.flags import config_flag, give, resolve, setting_flags
from astrai_server.config import ConfigError, Settings

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine, SamplingParams, TaskHandle
    from astrai_triton.tokenizer import Tokenizer

_NOT_FOR_ONE = frozenset(
    {"server.host", "server.port", "server.max_batch_size", "server.param_path", "server.trace_file"}
)


@click.command()
@click.argument("prompt")
@config_flag
@click.option("-m", "--model", metavar="TEXT", help="Known name, directory, .gguf file or org/name.")
@click.option("--system", metavar="TEXT", help="System prompt; the model's template may have one of its own.")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without the chat template.")
@click.option(
    "--temperature", type=click.FloatRange(0, 2), default=1.0, show_default=True, help="0 is greedy."
)
@click.option("--top-k", type=click.IntRange(-1), default=50, show_default=True, help="0 or -1: off.")
@click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True, help="1: off.")
@click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Length limit.")
@click.option("--seed", type=int, help="Same seed, same text.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends the answer; may be given again.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
@setting_flags(("server",), leave_out=_NOT_FOR_ONE)
@debug_flag
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    prompt: str,
    config: Path | None,
    model: str | None,
    system: str | None,
    raw: bool,
    quiet: bool,
    stop: tuple[str, ...],
    **sampling: Any,
) -> None:
    """Answer PROMPT; "-" reads it from stdin.

    The answer goes to stdout as it arrives, statistics to stderr.
    """
    if model is not None:
        give(ctx, "server.param_path", model)
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template; leave out --raw")
    text = sys.stdin.read() if prompt == "-" else prompt
    settings = _shrink(resolve(ctx, config).settings)
    # Slow to import, so only once the settings are known to be right.
    from astrai_server.loading import load_engine
    from astrai_server.terminal import LoadDisplay
    from astrai_triton.engine import SamplingParams

    # The engine logs the traceback of a failed task; here it is one line for everybody else.
    logging.basicConfig(level=logging.INFO if is_debug(ctx) else logging.CRITICAL, stream=sys.stderr)
    params = SamplingParams(stop=stop, **sampling)
    with LoadDisplay(sys.stderr, is_quiet=quiet) as display:
        engine = load_engine(settings, display)
    with engine:
        prompt_ids = _encode(engine, text, system, raw)
        started = time.perf_counter()
        handle = engine.submit(prompt_ids, _fit(engine, params, len(prompt_ids)))
        summary = _stream(handle, started)
    if not quiet:
        click.echo(summary, err=True)


def _shrink(settings: Settings) -> Settings:
    """One request at a time needs a pool for one; the trace of a configuration is its server's."""
    return attrs.evolve(settings, server=attrs.evolve(settings.server, max_batch_size=1, trace_file=None))


def _encode(engine: InferenceEngine, text: str, system: str | None, raw: bool) -> list[int]:
    # The engine asks less of a tokenizer than there is.
    tokenizer = cast("Tokenizer", engine.tokenizer)
    if raw:
        return tokenizer.encode(text)
    if tokenizer.chat_template is None:
        raise ConfigError(f"{engine.model_name} has no chat template; use --raw")
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.encode_chat(messages)


def _fit(engine: InferenceEngine, params: SamplingParams, prompt_len: int) -> SamplingParams:
    """Lower ``max_tokens`` to what the context leaves; a prompt without room is refused by ``submit``."""
    room = min(engine.max_seq_len, engine.pool.capacity_tokens) - prompt_len
    if params.max_tokens is None or room < 1 or params.max_tokens <= room:
        return params
    return attrs.evolve(params, max_tokens=room)


def _stream(handle: TaskHandle, started: float) -> str:
    """Write the answer as it comes; returns the statistics on one line."""
    first = last = started
    # A terminal obeys what a file or a pipe only carries.
    clean: Callable[[str], str] = ControlFilter().feed if sys.stdout.isatty() else str
    try:
        for event in handle.iter_events():
            last = time.perf_counter()
            if event.completion_tokens <= 1:
                first = last
            if event.text:
                click.echo(clean(event.text), nl=False)
            if event.error is not None:
                raise event.error
    except BaseException:
        handle.cancel()
        raise
    click.echo()
    num_tokens = event.completion_tokens
    rate = (num_tokens - 1) / (last - first) if num_tokens > 1 else 0.0
    return (
        f"[{handle.prompt_len} prompt tokens, {num_tokens} tokens, first after "
        f"{(first - started) * 1e3:.0f} ms, then {rate:.1f} tokens/s, finish {event.finish_reason}]"
    )
