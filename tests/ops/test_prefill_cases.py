"""Inputs that broke systems like this one: poison, empty requests, broken tables, odd strides, bad calls."""

from __future__ import annotations

import attrs
import pytest
import torch

import oracle
import strategies
from astrai_triton.ops.prefill import attn_prefill
from prefill_calls import check_paged, dense_case, expect_paged, run_paged, write_new
from strategies import Heads, PackedCase, Tensors, assert_close, packed_case

PLAIN = Heads(dtype=torch.float16, head_dim=16, value_dim=16, kv_heads=1, group=2)


def read_slots(case: PackedCase, tensors: Tensors) -> set[int]:
    """Slots that some row of a packed case sees."""
    table, seen, score = tensors.cache.req_to_token, set(), 0
    rows = tensors.cache.req_pool_indices.tolist()
    for table_row, q_len, kv_len in zip(rows, case.q_lens, case.kv_lens, strict=True):
        for row in range(q_len):
            for key in oracle.visible_keys(row, q_len, kv_len, case.options):
                mask = tensors.attn_mask
                if mask is None or mask[score + row * kv_len + key]:
                    seen.add(int(table[table_row, key]))
        score += q_len * kv_len
    return seen


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (oracle.Options(is_causal=True), {}),
        (oracle.Options(is_causal=True, window_size=(7, -1)), {"has_sinks": True}),
        (oracle.Options(window_size=(3, 2), softcap=3.0), {"holes": 0.3}),
        (oracle.Options(is_causal=True), {"has_mask": True}),
    ],
)
def test_what_no_row_sees_may_hold_anything(options: oracle.Options, changes: dict[str, object]) -> None:
    case = packed_case((5, 0, 40, 3), (70, 9, 90, 2), heads=PLAIN, options=options, **changes)
    tensors = strategies.build_packed(case)
    # Zeros where the builder put NaN, and in whatever else no row sees.
    k_buffer, v_buffer = (buffer.clone() for buffer in write_new(tensors))
    unseen = sorted(set(range(len(k_buffer))) - read_slots(case, tensors))
    k_buffer[unseen], v_buffer[unseen] = 0, 0
    clean, clean_lse = run_paged(case, tensors, k_buffer=k_buffer, v_buffer=v_buffer)
    assert_close(clean, expect_paged(case, tensors)[0])
    poison = torch.tensor((torch.nan, torch.inf, -torch.inf)).repeat(len(unseen))[: len(unseen), None, None]
    k_buffer[unseen], v_buffer[unseen] = poison.half(), poison.flip(0).half()
    out, lse = run_paged(case, tensors, k_buffer=k_buffer, v_buffer=v_buffer)
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)


@pytest.mark.parametrize("mask_dim", [2, 3])
def test_nan_behind_a_mask_is_not_seen(mask_dim: int) -> None:
    case = dense_case(4, 70, mask_dim=mask_dim, options=oracle.Options())
    q, k, v, mask, _ = strategies.build_dense(case)
    assert mask is not None
    mask[..., 5:9] = False
    want = attn_prefill(q, k, v, mask=mask)
    k[:, 5:9], v[:, 5:9] = torch.nan, torch.inf
    assert torch.equal(attn_prefill(q, k, v, mask=mask), want)


def test_empty_requests_disturb_nobody() -> None:
    check_paged(packed_case((2, 3, 4, 1, 0), (5, 0, 17, 0, 8)))


def test_requests_without_keys_give_zeros_and_minus_infinity() -> None:
    case = packed_case((2, 3), (0, 0))
    out, lse = run_paged(case, strategies.build_packed(case))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
def test_empty_dense_calls_are_legal(shape: tuple[int, int, int]) -> None:
    batch, q_len, kv_len = shape
    q, k = torch.randn(batch, q_len, 2, 16), torch.randn(batch, kv_len, 1, 16)
    out, lse = attn_prefill(q, k, k, return_lse=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_an_empty_packed_batch_is_legal() -> None:
    case = packed_case((), ())
    out, lse = run_paged(case, strategies.build_packed(case))
    assert out.shape[0] == lse.shape[0] == 0


def test_slots_beyond_the_pool_and_keys_beyond_the_table_are_masked() -> None:
    case = packed_case((3,), (9,))
    tensors = strategies.build_packed(case)
    cache = tensors.cache
    k_buffer, v_buffer = write_new(tensors)
    row = int(cache.req_pool_indices[0])
    broken = cache.req_to_token.clone()
    broken[row, 2], broken[row, 4], broken[row, 5] = len(k_buffer), -7, 2**31 - 1
    narrow = broken[:, :7]
    hidden = cache.req_to_token.clone()
    hidden[row, [2, 4, 5, 7, 8]] = -1
    want, _ = run_paged(case, tensors, req_to_token=hidden, k_buffer=k_buffer, v_buffer=v_buffer)
    got, _ = run_paged(case, tensors, req_to_token=narrow, k_buffer=k_buffer, v_buffer=v_buffer)
    assert torch.equal(got, want)


@pytest.mark.parametrize("row", [-1, 3, 2**31 - 1])
def test_a_row_that_does_not_exist_is_masked(row: int) -> None:
    case = packed_case((3,), (9,))
    tensors = strategies.build_packed(case)
    out, lse = run_paged(case, tensors, req_pool_indices=torch.tensor([row], dtype=torch.int32))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_strided_views_are_right() -> None:
    fused = torch.randn(2, 7, 4 + 2 + 2, 24)
    q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    want, _ = oracle.attend_dense(q, k, v, oracle.Options(is_causal=True))
    assert_close(attn_prefill(q, k, v, is_causal=True), want)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    out = torch.full((2, 4, 7, 24), torch.nan).transpose(1, 2)
    assert attn_prefill(*turned, is_causal=True, out=out) is out
    assert_close(out, want)


def test_a_strided_table_and_rows_are_right_and_a_strided_indptr_is_refused() -> None:
    case = packed_case((3, 4), (9, 4), holes=0.3)
    tensors = strategies.build_packed(case)
    want, _ = run_paged(case, tensors)
    wide = tensors.cache.req_to_token.repeat_interleave(2, 0).repeat_interleave(2, 1)
    q = torch.stack((tensors.q, tensors.q), 1).flatten(0, 1)
    got, _ = run_paged(case, attrs.evolve(tensors, q=q[::2]), req_to_token=wide[::2, ::2])
    assert torch.equal(got, want)
    for name in ("kv_indptr", "qo_indptr", "q_tile_to_batch", "q_tile_to_index", "req_pool_indices"):
        strided = getattr(tensors.cache, name).repeat_interleave(2)[::2]
        with pytest.raises(ValueError, match=rf"^{name}: wanted a unit last stride"):
            run_paged(case, tensors, **{name: strided})


def test_offsets_beyond_32_bits_are_right() -> None:
    # Only the pages of the three keys are ever touched.
    heads = Heads(dtype=torch.float16, head_dim=16, value_dim=16, kv_heads=1, group=1)
    q, k, v, _, _ = strategies.build_dense(dense_case(2, 3, heads=heads))
    far = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((1, 3, 1, 16), (0, 2**30 + 16, 16, 1))
    far.copy_(k)
    want = attn_prefill(q, k, v, is_causal=True)
    assert torch.equal(attn_prefill(q, far, v, is_causal=True), want)
    far.copy_(v)
    assert torch.equal(attn_prefill(q, k, far, is_causal=True), want)


def bad_dense(**changes: object) -> None:
    tensors = {"q": torch.randn(1, 3, 4, 16), "k": torch.randn(1, 5, 2, 16), "v": torch.randn(1, 5, 2, 16)}
    arguments = tensors | changes
    attn_prefill(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (TypeError, "^q: wanted one of", {"q": torch.randn(1, 3, 4, 16).double()}),
        (TypeError, "^v: wanted the dtype of k", {"v": torch.randn(1, 5, 2, 16).half()}),
        (ValueError, "^q: wanted a multiple of 2 kv heads", {"q": torch.randn(1, 3, 3, 16)}),
        (ValueError, "^q: wanted a head_dim", {"q": torch.randn(1, 3, 4, 12)}),
        (ValueError, "^k: wanted shape", {"q": torch.randn(2, 3, 4, 16)}),
        (ValueError, "^v: wanted shape", {"v": torch.randn(1, 4, 2, 16)}),
        (ValueError, "^v: wanted a unit last stride", {"v": torch.randn(1, 5, 16, 2).transpose(2, 3)}),
        (ValueError, "^mask: wanted shape", {"mask": torch.ones(1, 3, dtype=torch.bool)}),
        (TypeError, "^mask: wanted bool", {"mask": torch.ones(1, 5)}),
        (ValueError, "^window_size", {"window_size": (-2, 0)}),
        (ValueError, "^softcap", {"softcap": -1.0}),
        (ValueError, "^sinks: wanted shape", {"sinks": torch.zeros(2)}),
        (TypeError, "^out: wanted float32", {"out": torch.empty(1, 3, 4, 16).half()}),
        (ValueError, "^k_scale: wanted None unless", {"k_scale": 2.0}),
    ],
)
def test_a_bad_argument_is_named(error: type[Exception], match: str, changes: dict[str, object]) -> None:
    with pytest.raises(error, match=match):
        bad_dense(**changes)


def test_maps_that_do_not_fit_are_named() -> None:
    case = packed_case((3,), (9,))
    tensors = strategies.build_packed(case)
    cache = tensors.cache
    with pytest.raises(ValueError, match=r"^qo_indptr: wanted shape \[2\]"):
        run_paged(case, tensors, qo_indptr=cache.qo_indptr[:1])
    with pytest.raises(ValueError, match=r"^q_tile_to_index: wanted shape \[1\]"):
        run_paged(case, tensors, q_tile_to_index=cache.qo_indptr)
    with pytest.raises(TypeError, match=r"^kv_indptr: wanted int32"):
        run_paged(case, tensors, kv_indptr=cache.kv_indptr.long())
    with pytest.raises(ValueError, match=r"^max_kv_len: wanted >= 0"):
        run_paged(case, tensors, max_kv_len=-1)
