"""``astrai replay``: the steps of a trace again, up to the first that differs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from astrai_server.cli.failure import debug_flag
from astrai_server.cli.flags import config_flag, give, resolve, setting_flags
from astrai_server.config import ConfigError

if TYPE_CHECKING:
    from astrai_server.loading import LoadedModel
    from astrai_triton.engine.trace import Replay

_IN_THE_TRACE = frozenset(
    {
        "server.host",
        "server.port",
        "server.max_batch_size",
        "server.max_seq_len",
        "server.param_path",
        "server.cuda_graphs",
        "server.trace_file",
    }
)
_MAX_SHOWN = 200
"""Characters of each side of a difference."""


@click.command(short_help="Run a recorded trace again and show the first step that differs.")
@click.argument("trace", type=click.Path(path_type=Path))
@click.argument("model", required=False)
@config_flag
@setting_flags(("server",), leave_out=_IN_THE_TRACE)
@click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
@debug_flag
@click.pass_context
def replay(ctx: click.Context, /, trace: Path, model: str | None, config: Path | None, quiet: bool) -> None:
    """Take the steps of TRACE, a file that server.trace_file made, once more with MODEL.

    Model, device, dtype and number of threads should be those of the server; sizes, policy and requests are
    in the trace. The exit status is 0 if every step came out as recorded, and 1 at the first that did not.
    """
    if model is not None:
        give(ctx, "server.param_path", model)
    settings = resolve(ctx, config).settings
    with trace.open("rb"):
        # Whether it is there and may be read, before the model is loaded.
        pass
    # Slow to import, so only once the settings are known to be right.
    from astrai_server.loading import load_model
    from astrai_server.terminal import LoadDisplay

    settings = attrs.evolve(settings, server=attrs.evolve(settings.server, cuda_graphs=None))
    with LoadDisplay(sys.stderr, is_quiet=quiet) as display:
        loaded = load_model(settings, display)
    result = _run(trace, loaded)
    _show(result)
    ctx.exit(0 if result.difference is None else 1)


def _run(trace: Path, model: LoadedModel) -> Replay:
    from astrai_triton.engine import trace as traces
    from astrai_triton.errors import AstraiError, TraceError

    try:
        return traces.replay(trace, model.decoder, model.tokenizer)
    except TraceError:
        raise
    except (KeyError, TypeError, ValueError, AstraiError) as error:
        # A size the model has not, a token outside of its vocabulary, a line that somebody edited.
        reason = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{trace}: cannot be replayed with {model.name}: {reason}") from error


def _show(result: Replay) -> None:
    click.echo(f"steps       {result.num_steps}")
    if result.difference is None:
        click.echo("difference  none")
    else:
        difference = result.difference
        click.echo(f"difference  line {difference.line}, {difference.kind}")
        click.echo(f"  recorded  {_shorten(difference.recorded)}")
        click.echo(f"  replayed  {_shorten(difference.replayed)}")
        click.echo(
            "  (another model, device, dtype or number of threads than the server's would do this too)"
        )
    open_tasks = ", ".join(map(str, result.open_tasks))
    click.echo(f"open tasks  {open_tasks or 'none'}")


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
