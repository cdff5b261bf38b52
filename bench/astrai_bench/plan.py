"""Which kernels a call launches, with which grid: the ops' own choices, made without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import attrs

from astrai_bench.errors import BenchError
from astrai_bench.static import KernelReport, Listed, examine_variant

if TYPE_CHECKING:
    from astrai_bench.cases import Case
    from astrai_triton.ops.launch import Arch, Variant


@attrs.frozen
class PlannedLaunch:
    """One kernel of a call."""

    report: KernelReport
    is_listed: bool
    """Whether the library lists the variant."""
    grid: tuple[int, ...]
    ctas: int
    waves: float
    """CTAs over what all multiprocessors hold at once; 0 when not even one CTA fits."""
    num_sms: int


def plan_case(case: Case, arch: Arch, variants: Sequence[Listed]) -> list[PlannedLaunch]:
    """The launches of a call, compiled and measured.

    Args:
        case: dense or paged attention.
        arch: where it would run.
        variants: the library's list for ``arch``.

    Raises:
        BenchError: as ``list_launches``.
    """
    return [_measure(variant, grid, arch, variants) for variant, grid in list_launches(case, arch)]


def list_launches(case: Case, arch: Arch) -> list[tuple[Variant, tuple[int, ...]]]:
    """Variant and grid of each launch of a call over contiguous tensors without options.

    Decode is as the engine launches it, the new token's K and V appended in the kernel; prefill is causal.
    The longest request is what is said to be the most keys.

    Raises:
        BenchError: rotary, or head dims that the kernels have no tiles for.
    """
    from astrai_triton.ops.check import check_head_dim

    if case.op == "rotary":
        raise BenchError(
            "explain: wanted attention, got rotary; its table is astrai bench static --variant 'rotary*'"
        )
    try:
        check_head_dim("head_dim", case.head_dim)
    except ValueError as error:
        raise BenchError(str(error)) from error
    return _list_decode(case, arch) if case.is_decode else _list_prefill(case, arch)


def _list_decode(case: Case, arch: Arch) -> list[tuple[Variant, tuple[int, ...]]]:
    import torch

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
    splits = launch_decode.cover_splits(max(case.kv_lens), shape.chunk, launch_decode.WINDOW_MAX)
    flags = launch_decode.DecodeFlags(is_paged=case.is_paged, is_split=splits > 1, has_new=case.is_paged)
    attend, *merge = launch_decode.build_variants(arch, shape, flags)
    return [
        (attend, launch_decode.decode_grid(shape, attend.config, case.batch, splits)),
        *((variant, launch_decode.merge_grid(shape, variant.config, case.batch)) for variant in merge),
    ]


def _list_prefill(case: Case, arch: Arch) -> list[tuple[Variant, tuple[int, ...]]]:
    import torch

    from astrai_triton.ops import launch_prefill
    from astrai_triton.ops.prefill_plan import plan_dense, plan_packed
    from astrai_triton.schedule import build_q_tiles

    dtype = getattr(torch, case.dtype)
    shape = launch_prefill.PrefillShape(
        q_dtype=dtype,
        kv_dtype=dtype,
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        value_dim=case.head_dim,
    )
    flags = launch_prefill.PrefillFlags(is_packed=case.is_paged, has_right=True)
    if case.is_paged:
        plan = plan_packed(
            arch,
            shape,
            flags,
            batch=case.batch,
            num_tokens=case.num_tokens,
            num_q_tiles=len(build_q_tiles(case.q_lens)[0]),
            max_kv_len=max(case.kv_lens),
        )
    else:
        plan = plan_dense(
            arch,
            shape,
            flags,
            batch=case.batch,
            q_len=case.q_lens[0],
            kv_len=case.kv_lens[0],
            window_left=launch_prefill.WINDOW_MAX,
        )
    attend, *merge = launch_prefill.build_variants(arch, shape, plan.flags)
    return [
        (attend, plan.grid.shape),
        *(
            (variant, launch_prefill.merge_grid(variant.config, plan.grid, case.batch, case.q_heads))
            for variant in merge
        ),
    ]


def _measure(
    variant: Variant, grid: tuple[int, ...], arch: Arch, variants: Sequence[Listed]
) -> PlannedLaunch:
    from astrai_triton.ops.launch import FP_FUSION

    same = [listed for listed in variants if _is_same(listed.variant, variant)]
    # Under the name that its report in the list has.
    report = examine_variant(same[0] if same else Listed(variant, FP_FUSION), arch)
    at_once = report.resident_ctas * arch.num_sms
    ctas = prod(grid)
    waves = ctas / at_once if at_once else 0.0
    return PlannedLaunch(report, bool(same), grid, ctas, waves, arch.num_sms)


def _is_same(listed: Variant, variant: Variant) -> bool:
    """Whether two variants are one compilation, whatever their names."""
    return (
        listed.kernel is variant.kernel
        and listed.signature == variant.signature
        and listed.constexprs == variant.constexprs
        and listed.config == variant.config
    )
