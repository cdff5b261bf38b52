"""The rotary kernels against the float64 oracle: values, what is touched, strides, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from astrai_triton.ops import rotary
from astrai_triton.ops.rotary import rotary_emb, rotary_qk_
from strategies import DTYPES

PAIRINGS = ["adjacent", "half"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_table(positions: torch.Tensor, rotary_dim: int, base: float = 10000.0) -> torch.Tensor:
    """``[..., rotary_dim / 2, 2]`` float32 (cos, sin) of angles computed in float64."""
    inverse = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = positions.double()[..., None] * inverse
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float().to(DEVICE)


def rotate_all(x: torch.Tensor, table: torch.Tensor, pairing: str) -> torch.Tensor:
    """The oracle over x ``[..., H, D]`` and a table ``[..., R/2, 2]`` of its leading dimensions."""
    tokens = math.prod(x.shape[:-2])
    rows, turns = x.cpu().reshape(tokens, *x.shape[-2:]), table.cpu().reshape(tokens, *table.shape[-2:])
    out = torch.empty(rows.shape, dtype=torch.float64)
    for t, (row, turn) in enumerate(zip(rows, turns, strict=True)):
        for h, head in enumerate(row):
            out[t, h] = oracle.rotate(head, turn[:, 0], turn[:, 1], pairing)
    return out.view(x.shape).to(x.device)


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
@pytest.mark.parametrize("rotary_dim", [16, 32, 64, 96, 128])
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
    out = torch.full((2, 3, 5, 80), torch.nan, dtype=dtype, device=DEVICE)
    canary = as_bytes(out[..., 64:])
    got = rotary_emb(x, table, pairing=pairing, out=out[..., :64])
    assert got.data_ptr() == out.data_ptr()
    if rotary_dim < 64:
        assert torch.equal(as_bytes(got[..., rotary_dim:]), as_bytes(x[..., rotary_dim:]))
    clean = before.nan_to_num()
    want, got = rotate_all(clean, table, pairing), got.clone()
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
    one = make_table(torch.tensor([7]), 16)
    assert_turned(
        rotary_emb(x, one[None], pairing=pairing), rotate_all(x, one[None].expand(2, 3, 8, 2), pairing)
    )


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_out_may_be_x_itself(pairing: Any) -> None:
    x, table = make_rows(3, 2, 24), make_table(torch.arange(3), 16)
    want = rotate_all(x, table, pairing)
    assert rotary_emb(x, table, pairing=pairing, out=x) is x
    assert_turned(x, want)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_bfloat16_is_rounded_to_nearest_even(pairing: Any) -> None:
    # 1 + 2^-8 and 1 + 3 * 2^-8 lie half way between two bfloat16 numbers; the rest a little off that.
    step = 2.0**-8
    factors = torch.tensor(
        [1 + step, 1 + 3 * step, 1 + 1.01 * step, 1 + 0.99 * step, 3.39e38, 1 + 3.01 * step]
    )
    table = torch.stack((factors, torch.zeros(6)), dim=-1)[None].to(DEVICE)
    x = torch.ones(1, 1, 12, dtype=torch.bfloat16, device=DEVICE)
    got = rotary_emb(x, table, pairing=pairing).cpu()
    turned = factors.to(torch.bfloat16)
    want = turned.repeat_interleave(2) if pairing == "adjacent" else turned.repeat(2)
    assert torch.equal(got[0, 0], want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_in_their_pair(dtype: torch.dtype) -> None:
    x, table = make_rows(1, 2, 16, dtype=dtype), make_table(torch.tensor([1]), 16)
    x[0, 0, 2], x[0, 0, 6] = torch.nan, torch.inf
    got = rotary_emb(x, table)
    assert got[0, 0, 2:4].isnan().all()
    assert got[0, 0, 6:8].isinf().all()
    assert got[0, 0, [0, 1, 4, 5]].isfinite().all()
    assert got[0, 1].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 2, 16), (0, 3, 2, 16), (2, 0, 2, 16), (3, 0, 16)])
def test_nothing_to_rotate_is_legal(shape: tuple[int, ...]) -> None:
    table = torch.zeros(*shape[:-2], 8, 2, device=DEVICE)
    x = torch.empty(shape, device=DEVICE)
    assert rotary_emb(x, table).shape == shape
    rotary_qk_(x, x.clone(), table)


def test_only_k_may_have_heads() -> None:
    k, table = make_rows(3, 2, 16), make_table(torch.arange(3), 16)
    want = rotate_all(k, table, "adjacent")
    rotary_qk_(k[:, :0], k, table)
    assert_turned(k, want)


def test_q_and_k_share_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    kernel = rotary.rotate_qk_kernel

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(rotary, "rotate_qk_kernel", Counted())
    rotary_qk_(make_rows(3, 6, 64), make_rows(3, 2, 64), make_table(torch.arange(3), 64))
    assert len(launches) == 1


def test_offsets_beyond_32_bits_are_reached() -> None:
    # Pages of the 4 GB that nothing touches are never given out.
    far = 2**31 + 64
    memory = torch.empty(far + 64, dtype=torch.float16, device=DEVICE)
    x = memory.as_strided((2, 1, 32), (far, 32, 1))
    x.copy_(make_rows(2, 1, 32))
    table = make_table(torch.tensor([3, 4]), 32)
    want = rotate_all(x, table, "half")
    rotary_emb(x, table, pairing="half", out=x)
    assert_turned(x, want)


ROWS, TABLE = torch.zeros(3, 2, 16, device=DEVICE), torch.zeros(3, 8, 2, device=DEVICE)


@pytest.mark.parametrize(
    ("x", "table", "error", "message"),
    [
        (ROWS.double(), TABLE, TypeError, "x: wanted one of float16, bfloat16, float32, got float64"),
        (ROWS[0], TABLE, ValueError, r"x: wanted \[T, H, D\] or \[B, L, H, D\], got \[2, 16\]"),
        (ROWS.mT, TABLE, ValueError, "x: wanted a unit last stride"),
        (ROWS.new_zeros(1, 1, 1032), TABLE, ValueError, "x: wanted a head_dim of at most 1024, got 1032"),
        (ROWS, TABLE.bfloat16(), TypeError, "freqs_cis: wanted one of float32, got bfloat16"),
        (ROWS, TABLE[..., 0], ValueError, r"freqs_cis: wanted \[..., rotary_dim / 2, 2\]"),
        (ROWS, TABLE[:, :0], ValueError, "freqs_cis: wanted .*from 2 to the head_dim of x, 16"),
        (ROWS, TABLE.new_zeros(3, 9, 2), ValueError, "freqs_cis: wanted .*from 2 to the head_dim of x, 16"),
        (ROWS, TABLE.new_zeros(3, 2, 8).mT, ValueError, r"freqs_cis: wanted contiguous \(cos, sin\) pairs"),
        (ROWS, TABLE.new_zeros(4, 8, 2), ValueError, r"freqs_cis: wanted leading dimensions \[3\] of x"),
        (ROWS, TABLE[None], ValueError, "freqs_cis: wanted leading dimensions"),
        (
            ROWS,
            TABLE.to("meta"),
            ValueError,
            "freqs_cis: wanted the device of the first tensor, .* got meta",
        ),
        (ROWS.clone().requires_grad_(), TABLE, ValueError, "x: wanted a tensor without gradient"),
    ],
)
def test_a_bad_argument_is_named_before_any_launch(
    x: torch.Tensor, table: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rotary_emb(x, table)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (ROWS.half(), TypeError, "out: wanted float32, got float16"),
        (ROWS[..., :8], ValueError, r"out: wanted shape \[3, 2, 16\], got \[3, 2, 8\]"),
        (ROWS.new_zeros(3, 2, 32)[..., ::2], ValueError, "out: wanted a unit last stride"),
        (ROWS[:, :1].expand(3, 2, 16), ValueError, "out: wanted elements of their own"),
    ],
)
def test_an_out_that_does_not_fit_is_named(out: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rotary_emb(ROWS, TABLE, out=out)


@pytest.mark.parametrize(
    ("q", "k", "error", "message"),
    [
        (ROWS, ROWS.half(), TypeError, "k: wanted float32, got float16"),
        (ROWS, ROWS[:2], ValueError, r"k: wanted shape \[3, Hk, 16\], got \[2, 2, 16\]"),
        (ROWS, ROWS.new_zeros(3, 2, 24), ValueError, r"k: wanted shape \[3, Hk, 16\]"),
        (ROWS[:, :1].expand(3, 2, 16), ROWS, ValueError, "q: wanted elements of their own"),
        (ROWS, ROWS.to("meta"), ValueError, "k: wanted the device of the first tensor"),
    ],
)
def test_a_k_that_does_not_fit_q_is_named(
    q: torch.Tensor, k: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rotary_qk_(q, k, TABLE)


def test_an_unknown_pairing_is_an_error() -> None:
    unknown: Any = "interleaved"
    with pytest.raises(ValueError, match="pairing: wanted 'adjacent' or 'half', got 'interleaved'"):
        rotary_emb(ROWS, TABLE, pairing=unknown)
