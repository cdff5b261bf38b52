"""``astrai check``: what a configuration comes to, without loading or fetching anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from astrai_server.cli.failure import debug_flag
from astrai_server.cli.flags import resolve, setting_flags
from astrai_server.config import Resolved, Settings, list_options
from astrai_server.source import describe_value

if TYPE_CHECKING:
    from astrai_server.device import Placement
    from astrai_triton.checkpoint import Checkpoint

_SHORT_REQUEST_TOKENS = 512


@click.command(short_help="Show what a configuration comes to, and where each value comes from.")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@setting_flags()
@debug_flag
@click.pass_context
def check(ctx: click.Context, /, file: Path | None) -> None:
    """Show every setting with where it comes from, and what the KV pool would hold.

    FILE is a YAML configuration; flags and environment variables count as they do for serve.
    """
    resolved = resolve(ctx, file)
    _show_settings(resolved)
    _show_keys(resolved.settings)
    # Slow to import, so only once the settings are known to be right.
    from astrai_server.cpu import describe_kernels
    from astrai_server.device import place_model
    from astrai_server.loading import describe_placement, find_local
    from astrai_triton.checkpoint import open_checkpoint

    settings = resolved.settings
    placement = place_model(settings.server)
    _show("runs as", describe_placement(placement))
    if placement.device.type == "cpu":
        _show("CPU kernels", describe_kernels())
    path = find_local(settings.server.param_path)
    if path is None:
        _show("model", f"{settings.server.param_path} is not on this machine; serve fetches it, if it exists")
        _show("KV pool", _describe_unknown_pool(settings))
        return
    _show_model(settings, placement, open_checkpoint(path))


def _show_settings(resolved: Resolved) -> None:
    rows = [
        (option.name, _show_value(resolved.value(option.name)), resolved.origins[option.name])
        for option in list_options()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        click.echo(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")


def _show_keys(settings: Settings) -> None:
    """Names only."""
    from astrai_server.keys import load_keys

    keys = load_keys(settings, os.environ)
    click.echo()
    _show("API keys", f"{len(keys)}: {', '.join(keys.names)}" if keys else "none are asked for")


def _show_value(value: Any) -> str:
    return value if isinstance(value, str) else describe_value(value)


def _show(name: str, text: str) -> None:
    click.echo(f"{name:<12}  {text}")


def _show_model(settings: Settings, placement: Placement, model: Checkpoint) -> None:
    from astrai_server.capacity import MIB, count_parameters, plan_pool
    from astrai_server.device import free_bytes
    from astrai_server.loading import describe_pool

    config, item_size = model.config, placement.dtype.itemsize
    weights = count_parameters(config) * item_size
    free = free_bytes(placement.device)
    _show(
        "model", f"{model.path}: {config.arch}, {config.n_layers} layers, context {config.max_seq_len} tokens"
    )
    _show("weights", f"about {weights / MIB:.0f} MiB as {placement.dtype_name}")
    _show("free memory", "unknown" if free is None else f"{free / MIB:.0f} MiB on {placement.device}")
    plan = plan_pool(settings, config, item_size, None if free is None else max(0, free - weights))
    _show("KV", f"{plan.bytes_per_token} bytes per token")
    _show("KV pool", describe_pool(plan, settings))
    batch = settings.server.max_batch_size
    lengths = sorted({min(n, plan.max_seq_len) for n in (_SHORT_REQUEST_TOKENS, 2048, plan.max_seq_len)})
    at_once = ", ".join(f"{plan.count_requests(n, batch)} of {n} tokens" for n in lengths)
    _show("at once", f"{at_once}; max_batch_size={batch}, nothing shared")


def _describe_unknown_pool(settings: Settings) -> str:
    """What the settings alone say about the pool."""
    cache, server = settings.cache, settings.server
    if cache.n_tokens is not None:
        return f"{cache.n_tokens} tokens; bytes depend on the model"
    if cache.mode == "contiguous" and server.max_seq_len is not None:
        return f"{server.max_batch_size * server.max_seq_len} tokens; bytes depend on the model"
    return "depends on the model"
