"""The torch backend over the KV cache, against the float64 oracle."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import strategies
from astrai_triton.backend.base import Forward
from strategies import (
    Heads,
    PackedCase,
    Tensors,
    assert_close,
    build_packed,
    expected_packed,
    make_cache,
    packed_case,
    run_native,
)

NAN = float("nan")
INF = float("inf")


def check_case(case: PackedCase, *, may_read: bool | None = None, fwd: Forward | None = None) -> None:
    tensors = build_packed(case)
    want = expected_packed(case, tensors)
    assert_close(run_native(case, tensors, may_read=may_read, fwd=fwd), want)


@settings(max_examples=80, deadline=None)
@given(strategies.packed_cases(is_decode=True), st.booleans())
def test_decode_agrees_with_the_oracle(case: PackedCase, may_read: bool) -> None:
    check_case(case, may_read=may_read, fwd="decode")


@settings(max_examples=80, deadline=None)
@given(strategies.packed_cases(is_decode=False), st.booleans())
def test_ragged_prefill_agrees_with_the_oracle(case: PackedCase, may_read: bool) -> None:
    check_case(case, may_read=may_read, fwd="prefill")


@pytest.mark.parametrize("may_read", [True, False])
@pytest.mark.parametrize("fwd", ["decode", "prefill"])
def test_requests_without_keys_give_zero_and_disturb_nobody(fwd: Forward, may_read: bool) -> None:
    case = packed_case((1, 1, 1, 1), (5, 0, 17, 0))
    tensors = build_packed(case)
    got = run_native(case, tensors, may_read=may_read, fwd=fwd)
    assert_close(got, expected_packed(case, tensors))
    assert torch.equal(got[1], torch.zeros(6, 16))
    assert torch.equal(got[3], torch.zeros(6, 16))


@pytest.mark.parametrize("may_read", [True, False])
@pytest.mark.parametrize("fwd", ["decode", "prefill"])
def test_an_empty_batch_is_legal(fwd: Forward, may_read: bool) -> None:
    case = packed_case((), ())
    assert run_native(case, build_packed(case), may_read=may_read, fwd=fwd).shape == (0, 6, 16)


@pytest.mark.parametrize("may_read", [True, False])
def test_requests_without_rows_in_a_ragged_batch_are_skipped(may_read: bool) -> None:
    check_case(packed_case((0, 3, 0, 2, 0), (4, 3, 0, 9, 7)), may_read=may_read)
    check_case(packed_case((0, 0), (4, 0)), may_read=may_read)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (2, 3), (3, 2), (5, 2), (5, 64), (64, 5)])
@pytest.mark.parametrize("may_read", [True, False])
def test_causal_is_aligned_to_the_bottom_right(q_len: int, kv_len: int, may_read: bool) -> None:
    check_case(packed_case((q_len, q_len), (kv_len, kv_len)), may_read=may_read, fwd="prefill")


@pytest.mark.parametrize("window_size", [(0, 0), (3, 0), (15, -1), (16, 0), (100, 0), (4, 2)])
@pytest.mark.parametrize("is_decode", [True, False])
def test_a_window_covers_exactly_its_inclusive_range(window_size: tuple[int, int], is_decode: bool) -> None:
    q_lens = (1, 1, 1) if is_decode else (1, 20, 7)
    options = oracle.Options(is_causal=is_decode, window_size=window_size)
    check_case(packed_case(q_lens, (3, 40, 17), options=options))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16, 32])
def test_every_group_size_shares_its_kv_head(group: int) -> None:
    heads = Heads(dtype=torch.float32, head_dim=8, value_dim=8, kv_heads=2, group=group)
    check_case(packed_case((1, 1), (5, 9), heads=heads))
    check_case(packed_case((2, 2, 3), (5, 5, 3), heads=heads))


@pytest.mark.parametrize("head_dim", [16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", strategies.DTYPES)
def test_every_head_dim_works(head_dim: int, dtype: torch.dtype) -> None:
    heads = Heads(dtype=dtype, head_dim=head_dim, value_dim=head_dim, kv_heads=1, group=2)
    check_case(packed_case((1, 1), (5, 9), heads=heads))
    check_case(packed_case((2, 3), (5, 3), heads=heads))


def referenced_slots(case: PackedCase, tensors: Tensors) -> torch.Tensor:
    """bool ``[size]``: slots that some row of this step sees."""
    cache, mask = tensors.cache, tensors.attn_mask
    seen = torch.zeros(cache.k_buffer.shape[1], dtype=torch.bool)
    score = 0
    for row, q_len, kv_len in zip(cache.req_pool_indices.tolist(), case.q_lens, case.kv_lens, strict=True):
        for i in range(q_len):
            keys = oracle.visible_keys(i, q_len, kv_len, case.options)
            if mask is not None:
                keys = [key for key in keys if mask[score + i * kv_len + key]]
            slots = cache.req_to_token[row, keys].long()
            seen[slots[slots >= 0]] = True
        score += q_len * kv_len
    return seen


@pytest.mark.parametrize(("softcap", "has_mask"), [(0.0, False), (0.0, True), (2.0, False)])
@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("holes", [0.0, 0.4])
@pytest.mark.parametrize("may_read", [True, False])
@pytest.mark.parametrize("is_decode", [True, False])
def test_what_no_row_sees_may_hold_anything(
    is_decode: bool, may_read: bool, holes: float, window: int, softcap: float, has_mask: bool
) -> None:
    options = oracle.Options(is_causal=True, window_size=(window, -1), softcap=softcap)
    q_lens = (1, 1, 1) if is_decode else (4, 1, 9)
    case = packed_case(q_lens, (23, 1, 9), options=options, holes=holes, has_mask=has_mask)
    results = []
    for poison in (0.0, NAN, INF, -INF):
        tensors = build_packed(case)
        hidden = ~referenced_slots(case, tensors)
        tensors.cache.k_buffer[:, hidden] = poison
        tensors.cache.v_buffer[:, hidden] = poison
        # New rows that no row sees are stored all the same.
        new = torch.tensor([slot < 0 or bool(hidden[slot]) for slot in tensors.cache.out_cache_loc.tolist()])
        tensors.k[new] = poison
        tensors.v[new] = poison
        results.append(run_native(case, tensors, may_read=may_read))
    assert results[0].isfinite().all()
    for poisoned in results[1:]:
        assert torch.equal(poisoned, results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_bits_of_a_decoding_request_do_not_depend_on_its_batch_mates(
    dtype: torch.dtype, window: int, softcap: float
) -> None:
    heads = Heads(dtype=dtype, head_dim=64, value_dim=64, kv_heads=3, group=3)
    options = oracle.Options(is_causal=True, window_size=(window, 0), softcap=softcap)
    for kv_len in (1, 7, 100, 255, 300, 600):
        case = packed_case(
            (1,) * 4, (kv_len, 3, kv_len + 90, 900), heads=heads, options=options, page_size=16
        )
        together = build_packed(case)
        cache = together.cache
        alone = make_cache(
            cache.k_buffer.clone(),
            cache.v_buffer.clone(),
            cache.req_to_token,
            cache.req_pool_indices[:1].tolist(),
            (1,),
            (kv_len,),
            cache.out_cache_loc[:1].tolist(),
            q_heads=heads.q_heads,
        )
        solo = attrs.evolve(together, q=together.q[:1], k=together.k[:1], v=together.v[:1], cache=alone)
        assert torch.equal(run_native(case, solo), run_native(case, together)[:1])


@pytest.mark.parametrize("is_decode", [True, False])
def test_inputs_may_be_slices_of_one_fused_projection(is_decode: bool) -> None:
    case = packed_case((1, 1, 1) if is_decode else (2, 2, 5), (5, 5, 17))
    tensors = build_packed(case)
    fused = torch.cat((tensors.q, tensors.k, tensors.v), dim=1).flatten(1).unflatten(1, (10, 16))
    q, k, v = fused.split((6, 2, 2), dim=1)
    head_major = tensors.q.transpose(0, 1).contiguous().transpose(0, 1)
    want = expected_packed(case, tensors)
    assert_close(run_native(case, attrs.evolve(tensors, q=q, k=k, v=v)), want)
    assert_close(run_native(case, attrs.evolve(tensors, q=head_major)), want)
