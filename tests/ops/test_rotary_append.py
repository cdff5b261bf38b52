"""Rotary fused with the cache write: q, the slots written, the slots left alone, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_triton.ops.rotary import rotary_append_, rotary_emb
from strategies import DTYPES

PAIRINGS = ["adjacent", "half"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_pool(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Slots that hold NaN, and one element behind each row that belongs to nobody."""
    return torch.full((*shape[:-1], shape[-1] + 1), torch.nan, dtype=dtype, device=DEVICE)[..., :-1]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def slots_of(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=DEVICE)


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    pairing=st.sampled_from(PAIRINGS),
    slots=st.lists(st.integers(-2, 9), max_size=5, unique=True),
    q_heads=st.integers(0, 6),
    kv_heads=st.integers(1, 3),
    pairs=st.integers(1, 12),
    rest=st.integers(0, 5),
    value_dim=st.integers(1, 20),
)
def test_q_turns_and_each_row_lands_in_its_slot(
    dtype: torch.dtype,
    pairing: Any,
    slots: list[int],
    q_heads: int,
    kv_heads: int,
    pairs: int,
    rest: int,
    value_dim: int,
) -> None:
    tokens, head_dim, size = len(slots), 2 * pairs + rest, 7
    q, k, v = (
        make_rows(tokens, heads, dim, dtype=dtype)
        for heads, dim in ((q_heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    )
    freqs_cis = make_rows(tokens, pairs, 2)
    k_pool = make_pool(size, kv_heads, head_dim, dtype=dtype)
    v_pool = make_pool(size, kv_heads, value_dim, dtype=dtype)
    # The rotation alone is checked against the oracle elsewhere; here the bits must be the same.
    q_want, k_want = (rotary_emb(x, freqs_cis, pairing=pairing) for x in (q, k))
    k_before, v_before = k.clone(), v.clone()
    rotary_append_(q, k, v, freqs_cis, k_pool, v_pool, slots_of(*slots), pairing=pairing)
    assert torch.equal(q, q_want)
    assert torch.equal(k, k_before)
    assert torch.equal(v, v_before)
    written = {slot: row for row, slot in enumerate(slots) if 0 <= slot < size}
    for slot in range(size):
        if slot in written:
            assert torch.equal(k_pool[slot], k_want[written[slot]])
            assert torch.equal(v_pool[slot], v[written[slot]])
        else:
            assert k_pool[slot].isnan().all()
            assert v_pool[slot].isnan().all()


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_slices_of_one_projection_go_into_one_layer_of_the_pool(pairing: Any) -> None:
    fused = make_rows(5, 4 + 2 + 2, 16)
    before, pools = fused.clone(), torch.full((2, 3, 6, 2, 16), torch.nan, device=DEVICE)
    # Slots -1 and 6 of the middle layer would lie in its neighbours.
    freqs_cis, slots = make_rows(5, 8, 2), slots_of(5, 9, -1, 9, 0, 9, 6, 9, 2, 9)[::2]
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    rotary_append_(q, k, v, freqs_cis, pools[0, 1], pools[1, 1], slots, pairing=pairing)
    turned = rotary_emb(before[:, :6], freqs_cis, pairing=pairing)
    assert torch.equal(fused[:, :4], turned[:, :4])
    assert torch.equal(as_bytes(fused[:, 4:]), as_bytes(before[:, 4:]))
    assert torch.equal(pools[0, 1, [5, 0, 2]], turned[[0, 2, 4], 4:])
    assert torch.equal(pools[1, 1, [5, 0, 2]], before[[0, 2, 4], 6:])
    pools[:, 1, [5, 0, 2]] = torch.nan
    assert pools.isnan().all()


def test_what_a_dropped_row_holds_goes_nowhere() -> None:
    q, k, v = make_rows(2, 1, 16), make_rows(2, 1, 16), make_rows(2, 1, 16)
    k[0], v[0] = torch.nan, torch.inf
    k_pool, v_pool = torch.zeros_like(q).repeat(2, 1, 1), torch.zeros_like(q).repeat(2, 1, 1)
    rotary_append_(q, k, v, make_rows(2, 8, 2), k_pool, v_pool, slots_of(-1, 3))
    assert k_pool.isfinite().all()
    assert v_pool.isfinite().all()
    assert k_pool[:3].eq(0).all()


def test_no_rows_and_no_slots_are_legal() -> None:
    empty, pool = make_rows(0, 2, 16), make_pool(0, 2, 16)
    rotary_append_(empty, empty, empty, make_rows(0, 8, 2), pool, pool.clone(), slots_of())
    q, row = make_rows(1, 4, 16), make_rows(1, 2, 16)
    freqs_cis = make_rows(1, 8, 2)
    want = rotary_emb(q, freqs_cis)
    rotary_append_(q, row, row, freqs_cis, pool, pool.clone(), slots_of(0))
    assert torch.equal(q, want)


Q, K, V = make_rows(3, 4, 16), make_rows(3, 2, 16), make_rows(3, 2, 24)
TABLE, K_POOL, V_POOL = make_rows(3, 8, 2), make_pool(9, 2, 16), make_pool(9, 2, 24)
SLOTS = slots_of(0, 1, 2)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": Q[None]}, ValueError, r"q: wanted shape \[T, Hq, D\], got \[1, 3, 4, 16\]"),
        ({"k": K[:2]}, ValueError, r"k: wanted shape \[3, Hkv, 16\], got \[2, 2, 16\]"),
        ({"k": K.half()}, TypeError, "k: wanted one of float32, got float16"),
        ({"v": V[:, :1]}, ValueError, r"v: wanted shape \[3, 2, Dv\], got \[3, 1, 24\]"),
        ({"v": V.to("meta")}, ValueError, "v: wanted the device of the first tensor"),
        ({"freqs_cis": TABLE[:2]}, ValueError, "freqs_cis: wanted leading dimensions"),
        ({"k_buffer": V_POOL}, ValueError, r"k_buffer: wanted shape \[9, 2, 16\], got \[9, 2, 24\]"),
        ({"k_buffer": K_POOL.half()}, TypeError, "k_buffer: wanted float32, got float16"),
        ({"k_buffer": K_POOL[:1].expand(9, 2, 16)}, ValueError, "k_buffer: wanted elements of their own"),
        ({"v_buffer": V_POOL[:8]}, ValueError, r"v_buffer: wanted shape \[9, 2, 24\], got \[8, 2, 24\]"),
        ({"out_cache_loc": SLOTS.long()}, TypeError, "out_cache_loc: wanted int32, got int64"),
        ({"out_cache_loc": SLOTS[:2]}, ValueError, r"out_cache_loc: wanted shape \[3\], got \[2\]"),
    ],
)
def test_a_bad_argument_is_named_before_anything_is_written(
    changed: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    arguments = {
        "q": Q, "k": K, "v": V, "freqs_cis": TABLE,
        "k_buffer": K_POOL, "v_buffer": V_POOL, "out_cache_loc": SLOTS,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        rotary_append_(*(arguments | changed).values())
