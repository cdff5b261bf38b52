"""The calls of the cross-validation, and their tensors."""

from __future__ import annotations

import math

import pytest
import torch

import oracle
from astrai_bench.cross_cases import (
    CROSS_OPS,
    CrossCase,
    describe_cross_case,
    draw_cross_cases,
    list_cross_cases,
)
from astrai_bench.cross_compare import have_same_bits
from astrai_bench.cross_inputs import make_cross_inputs
from astrai_bench.cross_providers import compute_reference

CPU = torch.device("cpu")
EVERY = [*list_cross_cases(), *draw_cross_cases(24, 5)]


def name(case: CrossCase) -> str:
    return f"{case.op} {describe_cross_case(case)}"


def test_same_seed_draws_the_same_calls_and_more_of_them_keep_the_first() -> None:
    assert draw_cross_cases(20, 3) == draw_cross_cases(24, 3)[:20]
    assert draw_cross_cases(20, 3) != draw_cross_cases(20, 4)


def test_random_calls_touch_every_operation() -> None:
    assert {case.op for case in draw_cross_cases(len(CROSS_OPS), 0)} == set(CROSS_OPS)


def test_grid_has_every_operation_in_every_dtype() -> None:
    found = {(case.op, case.dtype) for case in list_cross_cases()}
    assert found == {(op, dtype) for op in CROSS_OPS for dtype in ("float32", "float16", "bfloat16")}


def test_grid_has_every_hard_input() -> None:
    cases = [case for case in list_cross_cases() if case.is_attention]
    for op in CROSS_OPS[:4]:
        ours = [case for case in cases if case.op == op]
        assert {case.layout for case in ours} == {"contiguous", "padded", "transposed", "odd"}, op
        assert any(case.head_dim == 80 for case in ours), op
        assert any(case.head_dim != case.value_dim for case in ours), op
        assert any(case.mask_dim for case in ours), op
        assert any(case.softcap for case in ours), op
        assert any(case.has_sinks for case in ours), op
        assert any(case.window != (-1, -1) for case in ours), op
        assert any(0 in case.kv_lens for case in ours), op
        assert any(case.group > 4 for case in ours), op
        assert any(case.holes for case in ours) == (ours[0].is_paged), op


@pytest.mark.parametrize("case", EVERY, ids=name)
def test_case_gives_the_same_bits_twice_and_poison_only_where_nothing_is_used(case: CrossCase) -> None:
    first, second = (make_cross_inputs(case, CPU, math.nan) for _ in range(2))
    for key, base in first.bases.items():
        assert have_same_bits(base, second.bases[key]), key
    harmless = compute_reference(case, make_cross_inputs(case, CPU, 0.0))
    poisoned = compute_reference(case, first)
    for key, vectors in poisoned.vectors.items():
        assert torch.equal(vectors, harmless.vectors[key])
        assert bool(torch.isfinite(vectors).all())


def test_layouts_are_what_they_are_called() -> None:
    def strides(layout: str) -> tuple[int, ...]:
        case = CrossCase(op="attn_prefill", layout=layout, q_lens=(3,), kv_lens=(5,))  # type: ignore[arg-type]
        q: torch.Tensor = make_cross_inputs(case, CPU, math.nan).arguments["q"]
        return (*q.stride(), q.storage_offset())

    assert strides("contiguous") == (384, 128, 32, 1, 0)
    assert strides("padded") == (600, 200, 40, 1, 0)
    assert strides("odd") == (420, 140, 35, 1, 1)
    assert strides("transposed") == (384, 32, 96, 1, 0)


@pytest.mark.parametrize("case", [case for case in EVERY if case.is_attention], ids=name)
def test_reference_agrees_with_attention_row_by_row(case: CrossCase) -> None:
    inputs = make_cross_inputs(case, CPU, math.nan)
    arguments, options = inputs.arguments, _options(case)
    got = compute_reference(case, inputs)
    if not case.is_paged:
        out, lse = oracle.attend_dense(
            arguments["q"],
            arguments["k"],
            arguments["v"],
            options,
            attn_mask=arguments["mask"],
            sinks=arguments["sinks"],
        )
        out, lse = out.flatten(0, 1), lse.flatten(0, 1)
    else:
        pools = [arguments["k_buffer"], arguments["v_buffer"]]
        if "new_k" in arguments:
            assert inputs.slots is not None
            slots = inputs.slots.tolist()
            pools = [
                oracle.write_rows(pool, arguments[new], slots)
                for pool, new in zip(pools, ("new_k", "new_v"), strict=True)
            ]
        out, lse = oracle.attend_packed(
            arguments["q"],
            *pools,
            arguments["req_to_token"],
            arguments["req_pool_indices"].tolist(),
            case.q_lens,
            case.kv_lens,
            options,
            attn_mask=arguments["mask"],
            sinks=arguments["sinks"],
        )
    torch.testing.assert_close(got.vectors["out"], out, rtol=1e-12, atol=1e-12)
    if got.lse is not None:
        torch.testing.assert_close(got.lse, lse, rtol=1e-12, atol=1e-12)


def _options(case: CrossCase) -> oracle.Options:
    return oracle.Options(
        is_causal=case.is_causal,
        softmax_scale=case.softmax_scale,
        window_size=case.window,
        softcap=case.softcap,
    )
