"""``astrai bench``: one module per command; torch and Triton are imported only where a command needs them."""

from __future__ import annotations

import click

from astrai_bench.cpu import cpu
from astrai_bench.cross import cross
from astrai_bench.engine import engine
from astrai_bench.grammars import grammar
from astrai_bench.kernels import COMMANDS
from astrai_bench.peers import peers
from astrai_bench.quality import quality
from astrai_bench.serve import serve
from astrai_bench.static_command import static

__all__ = ["bench"]


@click.group()
def bench() -> None:
    """Measure the kernels, or tell without a GPU what to expect of them."""


for _command in (*COMMANDS, static, cross, engine, grammar, cpu, serve, peers, quality):
    bench.add_command(_command)
