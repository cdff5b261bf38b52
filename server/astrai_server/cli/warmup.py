"""``astrai warmup``: everything that a first start would have to fetch, build or convert, done ahead."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import attrs
import click

from astrai_server.cli.failure import debug_flag, is_debug
from astrai_server.cli.flags import config_flag, give, resolve, setting_flags

_PROMPT_TOKENS, _ANSWER_TOKENS = 24, 4
_NOT_HERE = frozenset({"server.host", "server.port", "server.param_path", "server.trace_file"})


@click.command(short_help="Fetch, build and convert ahead what the first start needs.")
@click.argument("model", required=False)
@config_flag
@setting_flags(("server",), leave_out=_NOT_HERE)
@click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
@debug_flag
@click.pass_context
def warmup(ctx: click.Context, /, model: str | None, config: Path | None, quiet: bool) -> None:
    """Make the next start with MODEL and these settings a fast one.

    Fetches the model's files, builds the CPU kernels, or on a GPU compiles the Triton kernels, and answers a
    short prompt with them. What is made is kept in ASTRAI_HOME and in Triton's cache.
    """
    if model is not None:
        give(ctx, "server.param_path", model)
    settings = resolve(ctx, config).settings
    # Slow to import, so only once the settings are known to be right.
    from astrai_server.loading import load_engine
    from astrai_server.terminal import LoadDisplay
    from astrai_triton.engine import SamplingParams

    logging.basicConfig(level=logging.INFO if is_debug(ctx) else logging.CRITICAL, stream=sys.stderr)
    settings = attrs.evolve(settings, server=attrs.evolve(settings.server, trace_file=None))
    started = time.perf_counter()
    with LoadDisplay(sys.stderr, is_quiet=quiet) as display:
        engine = load_engine(settings, display, missing="build")
        with engine:
            prompt = [idx % engine.vocab_size for idx in range(min(_PROMPT_TOKENS, engine.max_seq_len // 2))]
            params = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
            handle = engine.submit(prompt, params)
            for event in handle.iter_events():
                if event.error is not None:
                    raise event.error
        display.say(f"warm     after {time.perf_counter() - started:.1f} s")
