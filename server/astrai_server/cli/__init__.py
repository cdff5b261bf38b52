"""The ``astrai`` command. One module per command; torch is imported only where a command needs it."""

from __future__ import annotations

import os

import click

from astrai_server.cli.bench import bench
from astrai_server.cli.chat import chat
from astrai_server.cli.check import check
from astrai_server.cli.failure import OneLineGroup
from astrai_server.cli.generate import generate
from astrai_server.cli.info import find_version, info
from astrai_server.cli.replay import replay
from astrai_server.cli.serve import serve
from astrai_server.cli.warmup import warmup

__all__ = ["main"]


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"astrai-triton {find_version('astrai-triton')}")
        ctx.exit()


@click.group(
    cls=OneLineGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version.",
)
def main() -> None:
    """Serve language models and run them, on a GPU or on a CPU."""
    # Read once, when torch is imported. Idle OpenMP threads otherwise spin for milliseconds, and as soon as
    # anything else wants the cores, each of a step's hundreds of parallel regions waits for a time slice: a
    # decode step took 2 s instead of 0.2 s at load 8. Measured on 2 idle cores, one row in bfloat16
    # (2026-11-30): 36 ms a step with the default, 40 with 10000, 47 with 1000.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


for _command in (serve, chat, generate, check, warmup, replay, info, bench):
    main.add_command(_command)
