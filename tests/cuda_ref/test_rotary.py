"""The rotary kernel of cuda_ref on the host: values, what is touched, strides and slots."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from cuda_ref.ops import rotary_append_, rotary_emb, rotary_qk_
from strategies import DTYPES

pytestmark = pytest.mark.usefixtures("host")

PAIRINGS = ["adjacent", "half"]


def make_rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_table(positions: torch.Tensor, rotary_dim: int, base: float = 10000.0) -> torch.Tensor:
    """``[..., rotary_dim / 2, 2]`` float32 (cos, sin) of angles computed in float64."""
    inverse = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = positions.double()[..., None] * inverse
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


def rotate_all(x: torch.Tensor, table: torch.Tensor, pairing: str) -> torch.Tensor:
    """The oracle over x ``[..., H, D]`` and a table ``[..., R/2, 2]`` of its leading dimensions."""
    tokens = math.prod(x.shape[:-2])
    rows, turns = x.reshape(tokens, *x.shape[-2:]), table.reshape(tokens, *table.shape[-2:])
    out = torch.empty(rows.shape, dtype=torch.float64)
    for t, (row, turn) in enumerate(zip(rows, turns, strict=True)):
        for h, head in enumerate(row):
            out[t, h] = oracle.rotate(head, turn[:, 0], turn[:, 1], pairing)
    return out.view(x.shape)


def assert_turned(got: torch.Tensor, want: torch.Tensor) -> None:
    """Float32 arithmetic, rounded once: 1e-6 in float32, else the float64 result rounded or its neighbour."""
    if got.dtype == torch.float32:
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-6)
    else:
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, want.to(got.dtype), atol=eps * 1e-3, rtol=eps)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("rotary_dim", [16, 64, 96, 128])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 256])
def test_q_and_k_turn_in_place_and_nothing_else_is_touched(
    pairing: Any, rotary_dim: int, head_dim: int
) -> None:
    if rotary_dim > head_dim:
        with pytest.raises(ValueError, match=r"freqs_cis: wanted .* rotary_dim from 2 to the head_dim of q"):
            rotary_qk_(
                make_rows(1, 1, head_dim), make_rows(1, 1, head_dim), make_table(torch.zeros(1), rotary_dim)
            )
        return
    # q, k, v and a canary behind them are slices of one row, as a fused projection leaves them.
    fused = make_rows(3, 3 + 1 + 1 + 1, head_dim)
    before, q, k = fused.clone(), fused[:, :3], fused[:, 3:4]
    table = make_table(torch.tensor([0, 77, 1_000_000]), rotary_dim)
    rotary_qk_(q, k, table, pairing=pairing)
    assert_turned(fused[:, :4], rotate_all(before[:, :4], table, pairing))
    assert torch.equal(as_bytes(fused[:, 4:]), as_bytes(before[:, 4:]))
    assert torch.equal(as_bytes(fused[:, :4, rotary_dim:]), as_bytes(before[:, :4, rotary_dim:]))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("rotary_dim", [2, 24, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_of_out_is_written_and_x_stays(
    pairing: Any, rotary_dim: int, dtype: torch.dtype
) -> None:
    x = make_rows(2, 3, 5, 64, dtype=dtype)
    x[0, 0, 0, -1] = torch.nan
    before = x.clone()
    table = make_table(torch.tensor([[0, 1, 2], [9, 5000, 1_000_000]]), rotary_dim)
    out = torch.full((2, 3, 5, 80), torch.nan, dtype=dtype)
    canary = as_bytes(out[..., 64:])
    got = rotary_emb(x, table, pairing=pairing, out=out[..., :64])
    assert got.data_ptr() == out.data_ptr()
    if rotary_dim < 64:
        assert torch.equal(as_bytes(got[..., rotary_dim:]), as_bytes(x[..., rotary_dim:]))
    want, got = rotate_all(before.nan_to_num(), table, pairing), got.clone()
    got[0, 0, 0], want[0, 0, 0] = 0, 0
    assert_turned(got, want)
    assert torch.equal(as_bytes(out[..., 64:]), canary)
    assert torch.equal(as_bytes(x), as_bytes(before))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape_and_strides_agree_with_the_oracle(data: st.DataObject) -> None:
    draw = data.draw
    dtype, pairing = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(PAIRINGS))
    leading = draw(st.one_of(st.tuples(st.integers(0, 4)), st.tuples(st.integers(0, 2), st.integers(0, 3))))
    pairs, rest = draw(st.integers(1, 20)), draw(st.integers(0, 9))
    head_dim = 2 * pairs + rest
    positions = torch.randint(0, 5000, leading, generator=torch.Generator().manual_seed(1))
    table = make_table(positions, 2 * pairs)
    both = []
    for name in ("q", "k"):
        heads = draw(st.integers(0, 6), label=f"heads of {name}")
        order = draw(st.permutations(range(len(leading) + 1)), label=f"memory order of {name}")
        start = draw(st.integers(0, 3), label=f"offset of {name}")
        pad = draw(st.integers(0, 3), label=f"padding of {name}")
        shape = (*leading, heads)
        rows = make_rows(*(shape[i] for i in order), head_dim + start + pad, dtype=dtype)
        inverse = [order.index(i) for i in range(len(shape))]
        both.append(rows[..., start : start + head_dim].permute(*inverse, len(shape)))
    q, k = both
    wants = [rotate_all(x, table, pairing) for x in both]
    for x, want in zip(both, wants, strict=True):
        assert_turned(rotary_emb(x, table, pairing=pairing), want)
    rotary_qk_(q, k, table, pairing=pairing)
    for x, want in zip(both, wants, strict=True):
        assert_turned(x, want)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_table_is_shared_by_what_it_broadcasts_to(pairing: Any) -> None:
    x, shared = make_rows(2, 3, 4, 16), make_table(torch.arange(3), 16)
    want = rotate_all(x, shared.expand(2, 3, 8, 2), pairing)
    for table in (shared, shared[None]):
        assert_turned(rotary_emb(x, table, pairing=pairing), want)


def shift(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, each row one element further than a multiple of 16 bytes."""
    rows = torch.zeros(*x.shape[:-1], x.shape[-1] + 16, dtype=x.dtype)[..., 1 : 1 + x.shape[-1]]
    return rows.copy_(x)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shifted", ["x", "out", "table"])
def test_rows_that_are_not_aligned_give_the_same_bits(pairing: Any, dtype: torch.dtype, shifted: str) -> None:
    x, table = make_rows(3, 2, 64, dtype=dtype), make_table(torch.arange(3), 32)
    want = rotary_emb(x, table, pairing=pairing)
    out = torch.empty_like(x)
    if shifted == "x":
        x = shift(x)
    elif shifted == "out":
        out = shift(out)
    else:
        table = shift(table.flatten(-2)).unflatten(-1, (16, 2))
    assert torch.equal(rotary_emb(x, table, pairing=pairing, out=out), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_dim", [12, 16])
@pytest.mark.parametrize("shifted", [None, "q", "k", "v", "k_pool", "v_pool"])
def test_so_do_unaligned_rows_of_the_pool(dtype: torch.dtype, value_dim: int, shifted: str | None) -> None:
    # Rows of v are aligned even where their length is no whole number of 16 bytes.
    tensors = {
        "q": make_rows(3, 2, 32, dtype=dtype),
        "k": make_rows(3, 2, 32, dtype=dtype, seed=1),
        "v": make_rows(3, 2, 16, dtype=dtype, seed=2)[..., :value_dim],
        "k_pool": torch.zeros(4, 2, 32, dtype=dtype),
        "v_pool": torch.zeros(4, 2, 16, dtype=dtype)[..., :value_dim],
    }
    table, slots = make_table(torch.arange(3), 32), torch.tensor([2, 0, 3], dtype=torch.int32)
    if shifted is not None:
        tensors[shifted] = shift(tensors[shifted])
    q, k, v, k_pool, v_pool = tensors.values()
    q_want, k_want = rotary_emb(q, table), rotary_emb(k, table)
    rotary_append_(q, k, v, table, k_pool, v_pool, slots)
    assert torch.equal(q, q_want)
    assert torch.equal(k_pool[slots.long()], k_want)
    assert torch.equal(v_pool[slots.long()], v)
    assert k_pool[1].eq(0).all()
    assert v_pool[1].eq(0).all()


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_bfloat16_is_rounded_to_nearest_even(pairing: Any) -> None:
    # 1 + 2^-8 and 1 + 3 * 2^-8 lie half way between two bfloat16 numbers; the rest a little off that.
    step = 2.0**-8
    factors = torch.tensor(
        [1 + step, 1 + 3 * step, 1 + 1.01 * step, 1 + 0.99 * step, 3.39e38, 1 + 3.01 * step]
    )
    table = torch.stack((factors, torch.zeros(6)), dim=-1)[None]
    got = rotary_emb(torch.ones(1, 1, 12, dtype=torch.bfloat16), table, pairing=pairing)
    turned = factors.to(torch.bfloat16)
    want = turned.repeat_interleave(2) if pairing == "adjacent" else turned.repeat(2)
    assert torch.equal(got[0, 0], want)


@pytest.mark.parametrize("shape", [(0, 2, 16), (0, 3, 2, 16), (2, 0, 2, 16), (3, 0, 16)])
def test_nothing_to_rotate_is_legal(shape: tuple[int, ...]) -> None:
    table = torch.zeros(*shape[:-2], 8, 2)
    x = torch.empty(shape)
    assert rotary_emb(x, table).shape == shape
    rotary_qk_(x, x.clone(), table)


def test_offsets_beyond_32_bits_are_reached() -> None:
    # Pages of the 4 GB that nothing touches are never given out.
    far = 2**31 + 64
    memory = torch.empty(far + 64, dtype=torch.float16)
    x = memory.as_strided((2, 1, 32), (far, 32, 1))
    x.copy_(make_rows(2, 1, 32))
    table = make_table(torch.tensor([3, 4]), 32)
    want = rotate_all(x, table, "half")
    assert rotary_emb(x, table, pairing="half", out=x) is x
    assert_turned(x, want)


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    pairing=st.sampled_from(PAIRINGS),
    slots=st.lists(st.integers(-2, 9), max_size=5, unique=True),
    heads=st.tuples(st.integers(0, 6), st.integers(1, 3)),
    pairs=st.sampled_from((1, 4, 8, 12)),
    rest=st.integers(0, 8),
    value_dim=st.integers(1, 20),
)
def test_q_turns_and_each_row_lands_in_its_slot(
    dtype: torch.dtype,
    pairing: Any,
    slots: list[int],
    heads: tuple[int, int],
    pairs: int,
    rest: int,
    value_dim: int,
) -> None:
    tokens, head_dim, size, kv_heads = len(slots), 2 * pairs + rest, 7, heads[1]
    q, k, v = (
        make_rows(tokens, count, dim, dtype=dtype)
        for count, dim in ((heads[0], head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    )
    freqs_cis = make_rows(tokens, pairs, 2)
    k_pool = torch.full((size, kv_heads, head_dim), torch.nan, dtype=dtype)
    v_pool = torch.full((size, kv_heads, value_dim), torch.nan, dtype=dtype)
    q_want, k_want = (rotary_emb(x, freqs_cis, pairing=pairing) for x in (q, k))
    k_before, v_before = k.clone(), v.clone()
    out_cache_loc = torch.tensor(slots, dtype=torch.int32)
    rotary_append_(q, k, v, freqs_cis, k_pool, v_pool, out_cache_loc, pairing=pairing)
    for got, want in ((q, q_want), (k, k_before), (v, v_before)):
        assert torch.equal(got, want)
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
    before, pools = fused.clone(), torch.full((2, 3, 6, 2, 16), torch.nan)
    # Slots -1 and 6 of the middle layer would lie in its neighbours.
    slots = torch.tensor([5, 9, -1, 9, 0, 9, 6, 9, 2, 9], dtype=torch.int32)[::2]
    freqs_cis = make_rows(5, 8, 2)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    rotary_append_(q, k, v, freqs_cis, pools[0, 1], pools[1, 1], slots, pairing=pairing)
    turned = rotary_emb(before[:, :6], freqs_cis, pairing=pairing)
    assert torch.equal(fused[:, :4], turned[:, :4])
    assert torch.equal(as_bytes(fused[:, 4:]), as_bytes(before[:, 4:]))
    assert torch.equal(pools[0, 1, [5, 0, 2]], turned[[0, 2, 4], 4:])
    assert torch.equal(pools[1, 1, [5, 0, 2]], before[[0, 2, 4], 6:])
    pools[:, 1, [5, 0, 2]] = torch.nan
    assert pools.isnan().all()


def test_no_rows_and_no_slots_are_legal() -> None:
    empty, pool = make_rows(0, 2, 16), make_rows(0, 2, 16)
    none = torch.zeros(0, dtype=torch.int32)
    rotary_append_(empty, empty, empty, make_rows(0, 8, 2), pool, pool.clone(), none)
    q, row, freqs_cis = make_rows(1, 4, 16), make_rows(1, 2, 16), make_rows(1, 8, 2)
    want = rotary_emb(q, freqs_cis)
    rotary_append_(q, row, row, freqs_cis, pool, pool.clone(), torch.zeros(1, dtype=torch.int32))
    assert torch.equal(q, want)


def test_a_write_outside_the_tensors_of_a_call_is_an_error(host: ModuleType) -> None:
    """The entry point itself, told of a row that is not there."""
    x, table = make_rows(2, 1, 16), make_table(torch.arange(2), 16)
    params = host.RotaryParams()
    params.q = params.q_out = x.data_ptr()
    params.freqs = table.data_ptr()
    params.q_stride_t = params.q_out_stride_t = params.freqs_stride_t = 16
    params.num_b, params.num_t, params.q_heads, params.head_dim, params.rotary_dim = 1, 2, 1, 16, 16
    ranges = [(x.data_ptr(), 4 * 16, True), (table.data_ptr(), 4 * 32, False)]
    with pytest.raises(host.CheckError, match="rotary_kernel"):
        host.rotary_emb(params, host.Dtype.f32, host.Pairing.half, 0, ranges)
    params.num_t = 1
    want = rotate_all(x[:1], table[:1], "half")
    host.rotary_emb(params, host.Dtype.f32, host.Pairing.half, 0, ranges)
    assert_turned(x[:1], want)
