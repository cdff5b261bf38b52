"""How a call of prefill attention is launched: everything that follows from its shape and lengths alone."""

from __future__ import annotations

import functools

import attrs

from astrai_triton.ops.launch import Arch, KernelConfig
from astrai_triton.ops.launch_prefill import (
    Grid,
    PrefillFlags,
    PrefillShape,
    choose_config,
    dense_grid,
    packed_grid,
)


@attrs.frozen(kw_only=True)
class PrefillPlan:
    """The choices of one call."""

    shape: PrefillShape
    flags: PrefillFlags
    """Those of the grid included."""
    config: KernelConfig
    grid: Grid


def plan_dense(
    arch: Arch,
    shape: PrefillShape,
    flags: PrefillFlags,
    *,
    batch: int,
    q_len: int,
    kv_len: int,
    window_left: int,
) -> PrefillPlan:
    """Plan a dense call; what ``flags`` say of the grid is not read."""
    config = choose_config(arch, shape, flags)
    grid = dense_grid(config, batch, q_len, kv_len, shape.q_heads, shape.kv_heads, window_left)
    return _make_plan(shape, flags, config, grid)


def plan_packed(
    arch: Arch,
    shape: PrefillShape,
    flags: PrefillFlags,
    *,
    batch: int,
    num_tokens: int,
    num_q_tiles: int,
    max_kv_len: int,
) -> PrefillPlan:
    """Plan a packed call; what ``flags`` say of the grid is not read."""
    config = choose_config(arch, shape, flags)
    grid = packed_grid(config, batch, num_tokens, num_q_tiles, max_kv_len, shape.q_heads, shape.kv_heads)
    return _make_plan(shape, flags, config, grid)


def _make_plan(shape: PrefillShape, flags: PrefillFlags, config: KernelConfig, grid: Grid) -> PrefillPlan:
    flags = _add_grid(flags, grid.is_short, grid.is_split)
    return PrefillPlan(shape=shape, flags=flags, config=config, grid=grid)


# A model has a handful of flags, and making them anew is dear in every layer of every step.
@functools.cache
def _add_grid(flags: PrefillFlags, is_short: bool, is_split: bool) -> PrefillFlags:
    return attrs.evolve(flags, is_short=is_short, is_split=is_split)
