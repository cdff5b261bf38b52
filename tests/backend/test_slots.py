"""Slots: negative, out of range, strided and far away ones, on the way in and on the way out."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import strategies
from astrai_triton.backend import attention
from astrai_triton.backend.base import Forward
from strategies import (
    PackedCase,
    assert_close,
    build_packed,
    expected_packed,
    make_cache,
    packed_case,
    run_native,
)


@pytest.mark.parametrize("may_read", [True, False])
def test_rows_with_a_negative_slot_are_not_written(may_read: bool) -> None:
    for loc in ([-1, 3, -1, 1], [2, 0, 1, -7], [-1, -1, -1, -1]):
        case = packed_case((4,), (4,))
        tensors = build_packed(case)
        cache = attrs.evolve(tensors.cache, out_cache_loc=torch.tensor(loc, dtype=torch.int32))
        want = oracle.write_rows(cache.k_buffer[1], tensors.k, loc)
        run_native(case, attrs.evolve(tensors, cache=cache), may_read=may_read)
        torch.testing.assert_close(cache.k_buffer[1], want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fwd", ["decode", "prefill"])
def test_slots_and_rows_out_of_range_are_errors_where_they_can_be_seen(fwd: Forward) -> None:
    case = packed_case((1, 1), (5, 17))
    tensors = build_packed(case)
    cache = tensors.cache
    size = cache.k_buffer.shape[1]
    table = cache.req_to_token.clone()
    table[cache.req_pool_indices[0].item(), 2] = size
    bad = {
        "req_to_token": table,
        "out_cache_loc": torch.tensor([0, size], dtype=torch.int32),
        "req_pool_indices": torch.tensor([0, 99], dtype=torch.int32),
    }
    for field, value in bad.items():
        with pytest.raises(ValueError, match=f"{field}: wanted"):
            run_native(
                case,
                attrs.evolve(tensors, cache=attrs.evolve(cache, **{field: value})),
                may_read=True,
                fwd=fwd,
            )


@pytest.mark.parametrize("fwd", ["decode", "prefill"])
def test_slots_and_rows_out_of_range_are_masked_where_they_cannot_be_seen(fwd: Forward) -> None:
    case = packed_case((1, 1), (5, 17))
    tensors = build_packed(case)
    cache = tensors.cache
    size = cache.k_buffer.shape[1]
    row = cache.req_pool_indices[0].item()
    beyond, masked = cache.req_to_token.clone(), cache.req_to_token.clone()
    beyond[row, 2], masked[row, 2] = size, -1
    results = [
        run_native(
            case,
            attrs.evolve(tensors, cache=attrs.evolve(cache, req_to_token=table)),
            may_read=False,
            fwd=fwd,
        )
        for table in (beyond, masked)
    ]
    assert torch.equal(results[0], results[1])
    no_row = attrs.evolve(cache, req_pool_indices=torch.tensor([99, -1], dtype=torch.int32))
    assert torch.equal(
        run_native(case, attrs.evolve(tensors, cache=no_row), may_read=False, fwd=fwd), torch.zeros(2, 6, 16)
    )


@pytest.mark.parametrize("is_decode", [True, False])
def test_index_tensors_may_be_strided(is_decode: bool) -> None:
    case = packed_case((1, 1, 1) if is_decode else (2, 2, 5), (5, 5, 17))
    tensors = build_packed(case)
    strided = {}
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "kv_indptr", "qo_indptr"):
        strided[name] = getattr(tensors.cache, name).repeat_interleave(2)[::2]
    strided["req_to_token"] = tensors.cache.req_to_token.repeat_interleave(2, dim=1)[:, ::2]
    want = expected_packed(case, tensors)
    assert_close(run_native(case, attrs.evolve(tensors, cache=attrs.evolve(tensors.cache, **strided))), want)


def test_slots_past_two_to_the_31_elements_are_reached(tmp_path: Path) -> None:
    """A sparse file stands in for a pool of 4 GiB; only the pages that are touched exist."""
    stride, size = 1 << 27, 18
    files = [tmp_path / "k", tmp_path / "v"]
    buffers = []
    for file in files:
        elements = torch.from_file(str(file), shared=True, size=stride * (size - 1) + 8, dtype=torch.float16)
        buffers.append(elements.as_strided((1, size, 1, 8), (0, stride, 8, 1)))
    table = torch.tensor([[17, 16, 15, 0]], dtype=torch.int32)
    small = torch.randn(2, 1, size, 1, 8, generator=torch.Generator().manual_seed(0)).half()
    for buffer, values in zip(buffers, small, strict=True):
        buffer[:] = values
    q, k, v = torch.randn(3, 1, 2, 8, generator=torch.Generator().manual_seed(1)).half()
    outs = []
    for k_buffer, v_buffer in (buffers, small):
        cache = make_cache(k_buffer, v_buffer, table, (0,), (1,), (4,), (0,), q_heads=2)
        outs.append(attention(q, k[:, :1], v[:, :1], cache, 0))
    for file in files:
        file.unlink()
    assert torch.equal(outs[0], outs[1])


@settings(max_examples=40, deadline=None)
@given(strategies.packed_cases(is_decode=False), st.booleans())
def test_new_rows_land_in_their_slots_and_nothing_else_changes(case: PackedCase, may_read: bool) -> None:
    tensors = build_packed(case)
    cache = tensors.cache
    slots = cache.out_cache_loc.tolist()
    want_k = torch.stack((cache.k_buffer[0], oracle.write_rows(cache.k_buffer[1], tensors.k, slots)))
    want_v = torch.stack((cache.v_buffer[0], oracle.write_rows(cache.v_buffer[1], tensors.v, slots)))
    run_native(case, tensors, may_read=may_read, fwd="prefill")
    torch.testing.assert_close(cache.k_buffer, want_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.v_buffer, want_v, rtol=0, atol=0, equal_nan=True)
