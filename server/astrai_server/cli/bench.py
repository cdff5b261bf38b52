"""``astrai bench``: the commands of ``astrai_bench``, imported when one of them is asked for."""

from __future__ import annotations

import click

from astrai_server.cli.failure import debug_flag


class _BenchGroup(click.Group):
    """Stands for the group in ``astrai_bench.cli``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from astrai_bench.cli import bench as group

        return group.list_commands(ctx)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        from astrai_bench.cli import bench as group

        return group.get_command(ctx, name)


@debug_flag
@click.group(cls=_BenchGroup, short_help="Measure the kernels, or predict them without a GPU.")
def bench() -> None:
    """Measure the kernels, or tell without a GPU what to expect of them."""
