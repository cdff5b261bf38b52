"""Prefill attention of the kernels against the float64 oracle: dense and packed, options, head shapes."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
import strategies
from astrai_triton.ops.prefill import attn_prefill
from prefill_calls import check_dense, check_paged, dense_case, fit_heads
from strategies import DenseCase, Heads, PackedCase, assert_close, packed_case

# The interpreter takes about 0.1 s a program, whatever its size.
few_examples = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(case=strategies.dense_cases())
@few_examples
def test_dense_attention_equals_the_oracle(case: DenseCase) -> None:
    check_dense(attrs.evolve(case, heads=fit_heads(case.heads)))


@given(case=strategies.packed_cases(is_decode=False))
@few_examples
def test_paged_attention_equals_the_oracle(case: PackedCase) -> None:
    check_paged(attrs.evolve(case, heads=fit_heads(case.heads)))


@given(
    q_len=st.integers(60, 140),
    prefix=st.integers(-20, 90),
    options=strategies.options(st.booleans()),
    widen=st.integers(1, 8),
    group=st.sampled_from((1, 2, 3)),
)
@few_examples
def test_every_edge_between_tiles_is_right(
    q_len: int, prefix: int, options: oracle.Options, widen: int, group: int
) -> None:
    window = tuple(side * widen if side >= 0 else -1 for side in options.window_size)
    check_dense(
        dense_case(
            q_len,
            q_len + prefix,
            heads=Heads(dtype=torch.float16, head_dim=16, value_dim=16, kv_heads=1, group=group),
            options=attrs.evolve(options, window_size=window),
        )
    )


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 2), (5, 2), (5, 64), (64, 5), (65, 70), (70, 65)])
def test_causality_is_aligned_to_the_last_key(shape: tuple[int, int]) -> None:
    check_dense(dense_case(*shape))
    check_paged(packed_case((shape[0],), (shape[1],)))


@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
def test_any_head_dim_is_right_and_stays_within_its_rows(head_dim: int) -> None:
    heads = Heads(dtype=torch.float16, head_dim=head_dim, value_dim=head_dim, kv_heads=1, group=1)
    case = dense_case(3, 20, heads=heads)
    canvas = torch.full((1, 3, 1, head_dim + 8), 7.0, dtype=torch.float16)
    check_dense(case, out=canvas[..., :head_dim])
    assert (canvas[..., head_dim:] == 7).all()


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16, 32])
@pytest.mark.parametrize("q_len", [3, 40])
def test_any_group_is_right(group: int, q_len: int) -> None:
    heads = Heads(dtype=torch.float16, head_dim=16, value_dim=16, kv_heads=1, group=group)
    check_paged(packed_case((q_len,), (q_len + 3,), heads=heads))


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_window_is_inclusive_far_into_a_long_request(is_causal: bool) -> None:
    heads = Heads(dtype=torch.float16, head_dim=16, value_dim=16, kv_heads=1, group=1)
    options = oracle.Options(is_causal=is_causal, window_size=(333, -1 if is_causal else 40))
    check_dense(dense_case(300, 4096, heads=heads, options=options))


def test_a_mask_of_rows_may_hide_a_whole_row_and_acts_with_causality() -> None:
    case = dense_case(6, 9, mask_dim=3, batch=2)
    q, k, v, mask, _ = strategies.build_dense(case)
    assert mask is not None
    mask[0, 2] = False
    want, want_lse = oracle.attend_dense(q, k, v, case.options, attn_mask=mask)
    out, lse = attn_prefill(q, k, v, mask=mask, is_causal=True, return_lse=True)
    assert_close(out, want)
    assert (out[0, 2] == 0).all()
    assert (lse[0, 2] == -torch.inf).all()
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_any_scale_is_right(scale: float) -> None:
    check_dense(dense_case(5, 9, options=oracle.Options(is_causal=True, softmax_scale=scale)))
    capped = oracle.Options(is_causal=True, softmax_scale=scale, softcap=1.5)
    check_dense(dense_case(5, 9, options=capped))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_fp8_keys_and_values_are_scaled(kv_dtype: torch.dtype) -> None:
    heads = Heads(dtype=torch.bfloat16, head_dim=16, value_dim=16, kv_heads=1, group=2)
    case = dense_case(5, 9, heads=heads)
    q, k, v, _, _ = strategies.build_dense(case)
    k, v = k.to(kv_dtype), v.to(kv_dtype)
    want, _ = oracle.attend_dense(q, k.double() * 0.5, v.double() * 3, case.options)
    out = attn_prefill(q, k, v, is_causal=True, k_scale=0.5, v_scale=3.0)
    # Weights and values are rounded by bfloat16; values are scaled by 3.
    torch.testing.assert_close(out.double(), want, atol=5e-2, rtol=3e-2)


def test_float32_is_exact_to_a_hundred_thousandth() -> None:
    heads = Heads(dtype=torch.float32, head_dim=128, value_dim=128, kv_heads=1, group=1)
    check_dense(dense_case(40, 200, heads=heads))
