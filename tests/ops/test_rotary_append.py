"""Rotary fused with the cache write: q, the slots written, the slots left alone, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from astrai_triton.ops import attn_paged_decode, rotary
from astrai_triton.ops.launch import ARCHES
from astrai_triton.ops.rotary import rotary_append_, rotary_emb, rotary_qk_
from strategies import DTYPES

PAIRINGS = ["adjacent", "half"]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_pool(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Slots that hold NaN, and one element behind each row that belongs to nobody."""
    return torch.full((*shape[:-1], shape[-1] + 1), torch.nan, dtype=dtype, device=DEVICE)[..., :-1]


def make_fp8_pool(*shape: int, dtype: torch.dtype, padding: int = 1) -> torch.Tensor:
    """As ``make_pool``; 0x7F is a NaN in both fp8 types."""
    size = (*shape[:-1], shape[-1] + padding)
    return torch.full(size, 0x7F, dtype=torch.uint8, device=DEVICE)[..., : shape[-1]].view(dtype)


def hold(rows: torch.Tensor, scale: float | None, dtype: torch.dtype) -> torch.Tensor:
    """``rows / scale`` as fp8, held within its finite range."""
    largest = torch.finfo(dtype).max
    return (rows.float() * (1 / (scale or 1.0))).clamp(-largest, largest).to(dtype)


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


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    kv_dtype=st.sampled_from(FP8),
    pairing=st.sampled_from(PAIRINGS),
    slots=st.lists(st.integers(-2, 9), max_size=5, unique=True),
    kv_heads=st.integers(1, 3),
    pairs=st.integers(1, 12),
    rest=st.integers(0, 5),
    value_dim=st.integers(1, 20),
    padding=st.sampled_from([0, 1, 16]),
    k_scale=st.sampled_from([None, 1e-6, 0.03, 0.5, 3.0]),
    v_scale=st.sampled_from([None, 1e-6, 0.03, 0.5, 3.0]),
)
def test_fp8_holds_what_is_turned_over_its_scale(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    pairing: Any,
    slots: list[int],
    kv_heads: int,
    pairs: int,
    rest: int,
    value_dim: int,
    padding: int,
    k_scale: float | None,
    v_scale: float | None,
) -> None:
    tokens, head_dim, size = len(slots), 2 * pairs + rest, 7
    q, k, v = (make_rows(tokens, kv_heads, dim, dtype=dtype) for dim in (head_dim, head_dim, value_dim))
    for row, slot in enumerate(slots):
        if not 0 <= slot < size:
            k[row], v[row] = torch.nan, torch.nan
    freqs_cis = make_rows(tokens, pairs, 2)
    k_pool = make_fp8_pool(size, kv_heads, head_dim, dtype=kv_dtype, padding=padding)
    v_pool = make_fp8_pool(size, kv_heads, value_dim, dtype=kv_dtype, padding=padding)
    q_want, k_want = (rotary_emb(x, freqs_cis, pairing=pairing) for x in (q, k))
    rotary_append_(
        q,
        k,
        v,
        freqs_cis,
        k_pool,
        v_pool,
        slots_of(*slots),
        pairing=pairing,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    assert torch.equal(q, q_want)
    written = {slot: row for row, slot in enumerate(slots) if 0 <= slot < size}
    for pool, rows, scale in ((k_pool, k_want, k_scale), (v_pool, v, v_scale)):
        for slot in range(size):
            if slot in written:
                want = hold(rows[written[slot]], scale, kv_dtype)
                assert torch.equal(as_bytes(pool[slot]), as_bytes(want))
            else:
                assert as_bytes(pool[slot]).eq(0x7F).all()


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("kv_dtype", FP8)
def test_fp8_keys_come_back_as_the_oracle_turns_them(kv_dtype: torch.dtype, pairing: Any) -> None:
    q, k, v = (make_rows(3, 2, 24, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    positions = torch.tensor([0.0, 77.0, 4000.0], dtype=torch.float64)
    angles = positions[:, None] * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    table = torch.stack((angles.cos(), angles.sin()), dim=-1).float().to(DEVICE)
    pools = [make_fp8_pool(5, 2, 24, dtype=kv_dtype) for _ in "kv"]
    rotary_append_(q, k, v, table, *pools, slots_of(4, 0, 2), pairing=pairing, k_scale=0.125, v_scale=0.25)
    got = [pool[[4, 0, 2]].double().cpu() for pool in pools]
    want = torch.stack(
        [
            torch.stack([oracle.rotate(head, turn[:, 0], turn[:, 1], pairing) for head in row])
            for row, turn in zip(k.cpu(), table.cpu(), strict=True)
        ]
    )
    # One rounding to bfloat16 and one to fp8; below 2^-6 fp8 has steps of the same size.
    eps = torch.finfo(kv_dtype).eps / 2 + torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(got[0] * 0.125, want, rtol=eps, atol=2.0**-10 * 0.125)
    torch.testing.assert_close(got[1] * 0.25, v.double().cpu(), rtol=eps, atol=2.0**-10 * 0.25)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", FP8)
def test_prefill_and_decode_leave_the_same_bytes_in_an_fp8_pool(
    kv_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    q, k, v = (make_rows(4, 2, 32, dtype=dtype, seed=seed) * 9 for seed in range(3))
    k[0, 0, 20:24] = torch.tensor([3e4, -3e4, torch.inf, torch.nan])
    v[1, 1, :4] = torch.tensor([3e4, -3e4, -torch.inf, torch.nan])
    freqs_cis, slots = make_rows(4, 8, 2), slots_of(3, -1, 0, 5)
    pools = [make_fp8_pool(6, 2, 32, dtype=kv_dtype, padding=0) for _ in range(4)]
    scales = {"k_scale": 0.7, "v_scale": 0.3}
    rotary_append_(q.clone(), k, v, freqs_cis, *pools[:2], slots, **scales)
    rotary_qk_(q, k, freqs_cis)
    attn_paged_decode(
        q,
        *pools[2:],
        slots[:, None],
        slots_of(0, 1, 2, 3),
        slots_of(0, 1, 2, 3, 4),
        new_k=k,
        new_v=v,
        **scales,
    )
    for prefilled, decoded in zip(pools[:2], pools[2:], strict=True):
        assert torch.equal(as_bytes(prefilled), as_bytes(decoded))
        assert as_bytes(prefilled[[1, 2, 4]]).eq(0x7F).all()


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
        (
            {"k_buffer": K_POOL.half()},
            TypeError,
            "k_buffer: wanted the dtype of q, float32, or .* got float16",
        ),
        ({"v_buffer": V_POOL.half()}, TypeError, "v_buffer: wanted float32, got float16"),
        (
            {"k_buffer": K_POOL.to(FP8[1])},
            TypeError,
            "an fp8 one with a 16-bit q, got float8_e5m2; cast it",
        ),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_scale": 0.0}, r"k_scale: wanted a finite number > 0, got 0\.0"),
        ({"v_scale": -1.0}, r"v_scale: wanted a finite number > 0, got -1\.0"),
        ({"v_scale": torch.inf}, "v_scale: wanted a finite number > 0, got inf"),
        (
            {"k_scale": torch.ones(())},
            "k_scale: wanted a finite number > 0, got tensor.*read tensors beforehand",
        ),
    ],
)
def test_a_scale_that_cannot_be_divided_by_is_named(options: dict[str, Any], message: str) -> None:
    pools = [make_fp8_pool(9, 2, dim, dtype=FP8[0]) for dim in (16, 24)]
    with pytest.raises(ValueError, match=message):
        rotary_append_(Q.half(), K.half(), V.half(), TABLE, *pools, SLOTS, **options)
    assert all(as_bytes(pool).eq(0x7F).all() for pool in pools)


def test_a_scale_without_fp8_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"k_scale: wanted None unless K and V are fp8, got 1\.0 with float32"
    ):
        rotary_append_(Q, K, V, TABLE, K_POOL, V_POOL, SLOTS, k_scale=1.0)


def test_e4m3_is_refused_where_the_architecture_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "arch_of", lambda device: ARCHES[80])
    pools = [make_fp8_pool(9, 2, dim, dtype=FP8[0]) for dim in (16, 24)]
    with pytest.raises(ValueError, match=r"k_buffer: wanted an architecture from sm_89 .* got sm_80; use"):
        rotary_append_(Q.half(), K.half(), V.half(), TABLE, *pools, SLOTS)
