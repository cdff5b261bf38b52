"""Which kernels a call launches, with which grid: the ops' own choices, made without tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import attrs

from astrai_bench.errors import BenchError
from astrai_bench.static import KernelReport, Listed, examine_variant

if TYPE_CHECKING:
    from astrai_bench.cases import Case
    from astrai_triton.ops.launch import Arch, KernelConfig


@attrs.frozen
class PlannedLaunch:
    """One kernel of a call."""

    report: KernelReport
    is_listed: bool
    """Whether the variant is in the list; otherwise it is the nearest of the list, cut to this shape."""
    grid: tuple[int, ...]
    ctas: int
    waves: float
    """CTAs over what all multiprocessors hold at once; 0 when not even one CTA fits."""
    num_sms: int


@attrs.frozen(eq=False)
class _Launch:
    kernel: Any
    constexprs: Mapping[str, Any]
    config: KernelConfig
    grid: tuple[int, ...]


def plan_case(case: Case, arch: Arch, variants: Sequence[Listed]) -> list[PlannedLaunch]:
    """The launches of a call, compiled and measured.

    Decode is as the engine launches it, the new token's K and V appended in the kernel; prefill is causal.

    Args:
        case: dense or paged attention.
        arch: where it would run.
        variants: the library's list for ``arch``.

    Raises:
        BenchError: rotary, or nothing in the list has this dtype.
    """
    if case.op == "rotary":
        raise BenchError(
            "explain: wanted attention, got rotary; its table is astrai bench static --variant 'rotary*'"
        )
    launches = _plan_decode(case, arch) if case.is_decode else _plan_prefill(case, arch)
    return [_measure(launch, case, arch, variants) for launch in launches]


def _plan_decode(case: Case, arch: Arch) -> list[_Launch]:
    import torch

    from astrai_triton.kernels.decode import attend_decode_kernel
    from astrai_triton.kernels.merge import merge_splits_kernel
    from astrai_triton.ops import launch_decode

    dtype = getattr(torch, case.dtype)
    shape = launch_decode.DecodeShape(
        q_dtype=dtype,
        kv_dtype=dtype,
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        value_dim=case.head_dim,
    )
    config = launch_decode.decode_config(
        arch, case.head_dim, case.head_dim, shape.group, case.itemsize, case.itemsize
    )
    splits = launch_decode.cover_splits(max(case.kv_lens), shape.chunk, launch_decode.WINDOW_MAX)
    flags = {"IS_PAGED": case.is_paged, "IS_SPLIT": splits > 1, "HAS_NEW": case.is_paged}
    constexprs = launch_decode.decode_constexprs(shape, config, **flags)
    grid = (case.batch, case.kv_heads * constexprs["GROUP_TILES"], splits)
    launches = [_Launch(attend_decode_kernel, constexprs, config, grid)]
    if splits > 1:
        config = launch_decode.merge_config(case.head_dim)
        constexprs = launch_decode.merge_constexprs(shape, config, IS_PAGED=case.is_paged)
        grid = (case.batch, case.q_heads, -(-case.head_dim // config.block_n))
        launches.append(_Launch(merge_splits_kernel, constexprs, config, grid))
    return launches


def _plan_prefill(case: Case, arch: Arch) -> list[_Launch]:
    import torch

    from astrai_triton.kernels.prefill import attend_prefill_kernel
    from astrai_triton.kernels.split import merge_prefill_kernel
    from astrai_triton.ops import launch_prefill
    from astrai_triton.schedule import Q_TILE

    heads = (case.q_heads, case.kv_heads)
    config = launch_prefill.prefill_config(
        arch, case.head_dim, case.head_dim, case.itemsize, mask_dim=0, has_left=False
    )
    if case.is_paged:
        num_tiles = sum(-(-q_len // Q_TILE) for q_len in case.q_lens)
        grid = launch_prefill.packed_grid(
            config, case.batch, case.num_tokens, num_tiles, max(case.kv_lens), *heads
        )
    else:
        window = launch_prefill.WINDOW_MAX
        grid = launch_prefill.dense_grid(config, case.batch, case.q_lens[0], case.kv_lens[0], *heads, window)
    constexprs = launch_prefill.prefill_constexprs(
        config,
        q_dtype=getattr(torch, case.dtype),
        head_dim=case.head_dim,
        value_dim=case.head_dim,
        heads=grid.heads,
        align=16,
        min_chunk=grid.min_chunk,
        mask_dim=0,
        IS_PACKED=case.is_paged,
        IS_PAGED=case.is_paged,
        IS_SPLIT=grid.max_tiles > 0,
        HAS_LEFT=False,
        HAS_RIGHT=True,
    )
    launches = [_Launch(attend_prefill_kernel, constexprs, config, grid.shape)]
    if grid.max_tiles:
        config = launch_prefill.merge_config()
        blocks = case.batch * grid.max_tiles * (Q_TILE // config.block_m)
        merged = launch_prefill.merge_constexprs(
            config, case.head_dim, 16, grid.min_chunk, IS_PACKED=case.is_paged
        )
        launches.append(_Launch(merge_prefill_kernel, merged, config, (blocks, case.q_heads)))
    return launches


def _measure(launch: _Launch, case: Case, arch: Arch, variants: Sequence[Listed]) -> PlannedLaunch:
    listed, is_listed = _find_variant(launch, case, variants)
    report = examine_variant(listed, arch)
    at_once = report.resident_ctas * arch.num_sms
    ctas = prod(launch.grid)
    waves = ctas / at_once if at_once else 0.0
    return PlannedLaunch(report, is_listed, launch.grid, ctas, waves, arch.num_sms)


def _find_variant(launch: _Launch, case: Case, variants: Sequence[Listed]) -> tuple[Listed, bool]:
    """The listed variant, or the one that agrees in most, with this call's tile and sizes."""
    element = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}[case.dtype]
    pointers = ("q_ptr", "k_ptr", "v_ptr", "out_ptr")

    def count_differences(listed: Listed) -> int:
        fixed = listed.variant.constexprs
        return sum(fixed.get(name) != value for name, value in launch.constexprs.items())

    candidates = [
        listed
        for listed in variants
        if listed.variant.kernel is launch.kernel
        and all(listed.variant.signature.get(name, element) in (element, "constexpr") for name in pointers)
    ]
    if not candidates:
        raise BenchError(f"dtype: wanted one that the kernels are listed for, got {case.dtype}")
    best = min(candidates, key=count_differences)
    if not count_differences(best):
        return best, True
    # Flags decide which arguments there are, so they stay; sizes and tiles are those of the call.
    sizes = {name: value for name, value in launch.constexprs.items() if not name.startswith(("IS_", "HAS_"))}
    constexprs = {**best.variant.constexprs, **sizes}
    return attrs.evolve(
        best, variant=attrs.evolve(best.variant, constexprs=constexprs, config=launch.config)
    ), False
