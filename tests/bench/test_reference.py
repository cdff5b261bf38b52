from __future__ import annotations

import math

import pytest
import torch

import oracle
from astrai_bench.cases import Case
from astrai_bench.inputs import (
    DenseInputs,
    PagedInputs,
    RotaryInputs,
    choose_num_sets,
    copy_inputs,
    count_operand_bytes,
    leaves_cache,
    make_inputs,
    store_new,
)
from astrai_bench.reference import TOLERANCE, choose_rows, collect, compute_expected, measure_error

CPU = torch.device("cpu")
DENSE = Case(
    op="prefill",
    q_heads=6,
    kv_heads=2,
    head_dim=16,
    q_lens=(5, 5),
    kv_lens=(9, 9),
    dtype="float32",
    page=0,
)
PAGED = Case(
    op="paged-prefill",
    q_heads=6,
    kv_heads=2,
    head_dim=16,
    q_lens=(5, 1, 7),
    kv_lens=(9, 4, 7),
    dtype="float32",
    page=4,
)
DECODE = Case(
    op="paged-decode",
    q_heads=6,
    kv_heads=2,
    head_dim=16,
    q_lens=(1, 1),
    kv_lens=(9, 4),
    dtype="float32",
    page=4,
)
ROTARY = Case(
    op="rotary",
    q_heads=6,
    kv_heads=2,
    head_dim=16,
    q_lens=(5, 3),
    kv_lens=(5, 3),
    dtype="float32",
    page=0,
)


def test_dense_reference_is_the_oracle() -> None:
    inputs = make_inputs(DENSE, CPU)
    assert isinstance(inputs, DenseInputs)
    out, _ = oracle.attend_dense(inputs.q, inputs.k, inputs.v, oracle.Options(is_causal=True))
    expected = compute_expected(DENSE, inputs)
    assert expected.rows.tolist() == list(range(10))
    torch.testing.assert_close(expected.values, out.flatten(0, 1))


@pytest.mark.parametrize("case", [PAGED, DECODE], ids=lambda case: case.op)
def test_paged_reference_is_the_oracle_and_the_rows_that_must_be_in_the_pool(case: Case) -> None:
    inputs = make_inputs(case, CPU)
    assert isinstance(inputs, PagedInputs)
    expected = compute_expected(case, inputs)
    cache = inputs.cache
    slots = cache.out_cache_loc.tolist()
    out, _ = oracle.attend_packed(
        inputs.q,
        oracle.write_rows(cache.k_buffer[0], inputs.k, slots),
        oracle.write_rows(cache.v_buffer[0], inputs.v, slots),
        cache.req_to_token,
        cache.req_pool_indices.tolist(),
        case.q_lens,
        case.kv_lens,
        oracle.Options(is_causal=True),
    )
    torch.testing.assert_close(expected.values, torch.cat((out, inputs.k.double(), inputs.v.double()), dim=1))
    assert bool(torch.isnan(cache.k_buffer[0, slots]).all()) is case.is_decode


def test_a_decode_that_leaves_nothing_in_the_pool_is_wrong() -> None:
    inputs = make_inputs(DECODE, CPU)
    assert isinstance(inputs, PagedInputs)
    expected = compute_expected(DECODE, inputs)
    right = expected.values[:, : DECODE.q_heads].float()
    assert measure_error(expected, collect(inputs, right)) == math.inf
    store_new(inputs)
    assert measure_error(expected, collect(inputs, right)) < 1e-6


def test_rotary_reference_is_the_oracle() -> None:
    inputs = make_inputs(ROTARY, CPU)
    assert isinstance(inputs, RotaryInputs)
    expected = compute_expected(ROTARY, inputs)
    for x, got in ((inputs.q, expected.values[:, :6]), (inputs.k, expected.values[:, 6:])):
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
        turned = pairs * torch.view_as_complex(inputs.freqs_cis.double())[:, None]
        torch.testing.assert_close(got, torch.view_as_real(turned).flatten(-2))
    # The second request starts at position 0 again.
    assert inputs.freqs_cis[5].tolist() == inputs.freqs_cis[0].tolist()


def test_the_error_is_relative_to_each_head_vector() -> None:
    inputs = make_inputs(DENSE, CPU)
    expected = compute_expected(DENSE, inputs)
    off = expected.values.clone()
    off[3, 4] *= 1.25
    assert measure_error(expected, off) == pytest.approx(0.25)
    assert measure_error(expected, torch.zeros_like(off)) == 1.0


@pytest.mark.parametrize("spoil", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_wrong(spoil: float) -> None:
    inputs = make_inputs(DENSE, CPU)
    expected = compute_expected(DENSE, inputs)
    got = expected.values.clone()
    got[-1, -1, -1] = spoil
    assert measure_error(expected, got) == math.inf
    assert measure_error(expected, expected.values[:, :, :3]) == math.inf
    assert measure_error(expected, expected.values[:4]) == math.inf


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_the_tolerance_admits_rounding_the_result_and_not_twenty_times_that(dtype: str) -> None:
    inputs = make_inputs(DENSE, CPU)
    expected = compute_expected(DENSE, inputs)
    rounded = expected.values.to(getattr(torch, dtype))
    assert measure_error(expected, rounded) <= TOLERANCE[dtype]
    unit = {"float32": 2.0**-12, "float16": 2.0**-9, "bfloat16": 2.0**-6}[dtype]
    assert measure_error(expected, expected.values * (1 + unit)) > TOLERANCE[dtype]


def test_chosen_rows_are_few_and_hold_the_first_and_the_last() -> None:
    rows = choose_rows(8192, 4 * 8192)
    assert (rows[0], rows[-1], len(rows)) == (0, 8191, 256)
    assert choose_rows(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert choose_rows(1, 10).tolist() == [0]
    assert len(choose_rows(1000, 1 << 40)) == 2


def test_copies_have_memory_of_their_own() -> None:
    for case in (DENSE, DECODE, ROTARY):
        inputs = make_inputs(case, CPU)
        copied = copy_inputs(inputs)
        assert copied.q.equal(inputs.q)
        assert copied.k.data_ptr() != inputs.k.data_ptr()
        if isinstance(inputs, PagedInputs):
            assert isinstance(copied, PagedInputs)
            assert copied.cache.k_buffer.data_ptr() != inputs.cache.k_buffer.data_ptr()
            assert copied.cache.kv_lens == inputs.cache.kv_lens


def test_nobody_owns_the_page_that_is_nan() -> None:
    inputs = make_inputs(PAGED, CPU)
    assert isinstance(inputs, PagedInputs)
    cache = inputs.cache
    used = [
        slot
        for row, kv_len in zip(cache.req_to_token.tolist(), PAGED.kv_lens, strict=True)
        for slot in row[:kv_len]
    ]
    assert len(set(used)) == sum(PAGED.kv_lens)
    assert not torch.isnan(cache.k_buffer[0, used]).any()
    assert torch.isnan(cache.k_buffer[0, -PAGED.page :]).all()
    assert count_operand_bytes(inputs) > cache.k_buffer.numel() * 8


@pytest.mark.parametrize(
    ("bytes_each", "cache_bytes", "free_bytes", "num_sets", "is_cold"),
    [
        (10, 100, 10_000, 21, True),
        (1000, 100, 10_000, 2, True),
        (10, 100, 100, 5, False),  # no more than half of what is free
        (1, 1_000_000, 1 << 40, 64, False),
        (1000, 100, 500, 1, False),
    ],
)
def test_sets_are_enough_to_leave_the_cache_where_memory_allows(
    bytes_each: int, cache_bytes: int, free_bytes: int, num_sets: int, is_cold: bool
) -> None:
    assert choose_num_sets(bytes_each, cache_bytes, free_bytes) == num_sets
    assert leaves_cache(num_sets, bytes_each, cache_bytes) is is_cold
