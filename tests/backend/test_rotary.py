"""Rotary embedding against the float64 oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from astrai_triton.backend import apply_rotary_emb, attn_backend
from astrai_triton.ops import rotary
from astrai_triton.ops.launch import IS_INTERPRETED
from strategies import DTYPES, assert_close

PAIRINGS = ["adjacent", "half"]


def make_table(positions: torch.Tensor, rotary_dim: int, base: float = 10000.0) -> torch.Tensor:
    """``[..., rotary_dim / 2, 2]`` float32 (cos, sin) of angles computed in float64."""
    inverse = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = positions.double()[..., None] * inverse
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


def rotate_all(x: torch.Tensor, freqs_cis: torch.Tensor, pairing: str) -> torch.Tensor:
    """The oracle over x ``[T, H, D]`` and a table ``[T, R/2, 2]``."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            out[t, h] = oracle.rotate(x[t, h], freqs_cis[t, :, 0], freqs_cis[t, :, 1], pairing)
    return out


def make_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("rotary_dim", [16, 32, 64, 96, 128])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_leading_elements_turn_and_the_rest_stays(
    pairing: Any, rotary_dim: int, head_dim: int, dtype: torch.dtype
) -> None:
    if rotary_dim > head_dim:
        with pytest.raises(ValueError, match="rotary_dim at most the head_dim"):
            apply_rotary_emb(
                make_rows(1, 1, head_dim), make_table(torch.zeros(1), rotary_dim), pairing=pairing
            )
        return
    x = make_rows(3, 2, head_dim).to(dtype)
    table = make_table(torch.tensor([0, 5, 1_000_000]), rotary_dim)
    got = apply_rotary_emb(x, table, pairing=pairing)
    assert got.dtype == dtype
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    want = rotate_all(x, table, pairing)
    if dtype == torch.float32:
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-6)
    else:
        # Computed in float32 and rounded once: the float64 result rounded, or its neighbour where it lies
        # between.
        torch.testing.assert_close(got, want.to(dtype), atol=0, rtol=2 * torch.finfo(dtype).eps)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(PAIRINGS),
    st.sampled_from(DTYPES),
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(0, 2),
)
def test_any_shape_agrees_with_the_oracle(
    pairing: Any, dtype: torch.dtype, tokens: int, heads: int, pairs: int, rest: int
) -> None:
    x = make_rows(tokens, heads, 2 * pairs + rest).to(dtype)
    table = make_table(torch.arange(tokens), 2 * pairs)
    assert_close(apply_rotary_emb(x, table, pairing=pairing), rotate_all(x, table, pairing))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_batches_take_a_table_of_their_own_or_a_shared_one(pairing: Any) -> None:
    x = make_rows(2, 3, 4, 16)
    own = make_table(torch.arange(6).view(2, 3), 16)
    shared = make_table(torch.arange(3), 16)
    got_own, got_shared = (apply_rotary_emb(x, table, pairing=pairing) for table in (own, shared))
    kept = apply_rotary_emb(x, shared[None], pairing=pairing)
    for b in range(2):
        assert_close(got_own[b], rotate_all(x[b], own[b], pairing))
        assert_close(got_shared[b], rotate_all(x[b], shared, pairing))
        assert_close(kept[b], rotate_all(x[b], shared, pairing))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_pair_of_cos_and_sin_is_the_same_table(pairing: Any) -> None:
    x, table = make_rows(3, 2, 16), make_table(torch.arange(3), 16)
    pair = (table[..., 0], table[..., 1])
    assert torch.equal(
        apply_rotary_emb(x, pair, pairing=pairing), apply_rotary_emb(x, table, pairing=pairing)
    )


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_strided_views_are_taken_as_they_are_and_stay_untouched(pairing: Any) -> None:
    table = make_table(torch.arange(3), 16)
    fused = make_rows(3, 10 * 16)
    odd = make_rows(3, 2 * 17 + 1)[:, 1:].unflatten(1, (2, 17))[..., :16]
    views = [
        fused.unflatten(1, (10, 16))[:, 6:8],
        make_rows(2, 3, 16).transpose(0, 1),
        make_rows(6, 2, 16)[::2],
        make_rows(3, 2, 32)[..., ::2],
        make_rows(3 * 2 * 16 + 1)[1:].view(3, 2, 16),
        odd,
    ]
    for x in views:
        before = x.clone()
        assert_close(apply_rotary_emb(x, table, pairing=pairing), rotate_all(x, table, pairing))
        assert torch.equal(x, before)
    strided_table = torch.stack((table, table), dim=-1).flatten(-2)[..., ::2]
    assert_close(
        apply_rotary_emb(views[0], strided_table, pairing=pairing), rotate_all(views[0], table, pairing)
    )


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_the_gradient_is_the_turn_back(pairing: Any, rotary_dim: int) -> None:
    x = make_rows(3, 2, 16).requires_grad_()
    table = make_table(torch.arange(3), rotary_dim)
    weight = make_rows(3, 2, 16, seed=1)
    (apply_rotary_emb(x, table, pairing=pairing) * weight).sum().backward()
    back = table * torch.tensor([1.0, -1.0])
    assert x.grad is not None
    assert_close(x.grad, rotate_all(weight, back, pairing))


def test_the_pairings_differ_by_a_permutation_of_the_elements() -> None:
    x, table = make_rows(3, 2, 16), make_table(torch.arange(3), 16)
    to_half = torch.arange(16).view(8, 2).T.flatten()
    adjacent = apply_rotary_emb(x, table, pairing="adjacent")
    half = apply_rotary_emb(x[..., to_half], table, pairing="half")
    torch.testing.assert_close(adjacent[..., to_half], half, atol=1e-6, rtol=1e-6)


def test_one_pair_turns_counter_clockwise() -> None:
    x = torch.tensor([[[1.0, 0.0]]])
    got = apply_rotary_emb(x, make_table(torch.tensor([math.pi / 2]), 2))
    torch.testing.assert_close(got, torch.tensor([[[0.0, 1.0]]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("x", "table", "error", "message"),
    [
        (torch.zeros(3, 2, 8).double(), torch.zeros(3, 4, 2), TypeError, "x: wanted float16"),
        (torch.zeros(3, 2, 8), torch.zeros(3, 4, 2).bfloat16(), TypeError, "freqs_cis: wanted float32"),
        (
            torch.zeros(3, 2, 8),
            torch.zeros(3, 4),
            ValueError,
            r"freqs_cis: wanted \[..., rotary_dim / 2, 2\]",
        ),
        (torch.zeros(3, 2, 8), torch.zeros(2), ValueError, "freqs_cis: wanted"),
        (
            torch.zeros(3, 2, 8),
            torch.zeros(3, 5, 2),
            ValueError,
            "rotary_dim at most the head_dim of x, got 10",
        ),
        (
            torch.zeros(3, 2, 8),
            torch.zeros(4, 4, 2),
            ValueError,
            r"leading dimensions \(3,\) of x without heads",
        ),
        (torch.zeros(3, 2, 8), torch.zeros(1, 3, 4, 2), ValueError, "leading dimensions"),
        (
            torch.zeros(3, 2, 8),
            (torch.zeros(3, 4), torch.zeros(3, 5)),
            ValueError,
            "cos, sin: wanted the same shape",
        ),
    ],
)
def test_a_bad_argument_is_named(x: torch.Tensor, table: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        apply_rotary_emb(x, table)


def test_an_unknown_pairing_is_an_error() -> None:
    unknown: Any = "interleaved"
    with pytest.raises(ValueError, match="pairing: wanted 'adjacent' or 'half', got 'interleaved'"):
        apply_rotary_emb(torch.zeros(1, 1, 4), torch.zeros(1, 2, 2), pairing=unknown)


interpreted = pytest.mark.skipif(
    not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1: the kernel runs on CPU tensors here"
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grid of every launch of the rotary kernel."""
    grids = []
    kernel = rotary.rotate_qk_kernel

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(rotary, "rotate_qk_kernel", Counted())
    return grids


@interpreted
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_interpreted_kernel_runs_where_triton_is_chosen(
    pairing: Any, dtype: torch.dtype, launches: list[tuple[int, ...]]
) -> None:
    x, table = make_rows(2, 3, 4, 24).to(dtype), make_table(torch.arange(3), 16)
    want = apply_rotary_emb(x, table, pairing=pairing)
    with attn_backend("torch_native"):
        assert torch.equal(apply_rotary_emb(x, table, pairing=pairing), want)
    assert not launches
    with attn_backend("triton"):
        got = apply_rotary_emb(x, table, pairing=pairing)
    assert len(launches) == 1
    assert_close(got, want.double())


@pytest.mark.parametrize(
    ("x", "table"),
    [
        (make_rows(3, 2, 16).requires_grad_(), make_table(torch.arange(3), 16)),
        (make_rows(3, 2, 32)[..., ::2], make_table(torch.arange(3), 16)),
        (make_rows(3, 2, 16), make_table(torch.arange(3), 16).mT.contiguous().mT),
        (make_rows(3, 2, 16), torch.zeros(3, 0, 2)),
        (make_rows(2, 2, 3, 2, 16), make_table(torch.arange(3), 16)),
        (make_rows(1, 1, 2048), make_table(torch.arange(1), 2048)),
    ],
    ids=["gradient", "strided head", "strided table", "no pairs", "five dimensions", "very wide head"],
)
def test_what_the_kernel_does_not_take_runs_in_torch(
    x: torch.Tensor, table: torch.Tensor, launches: list[tuple[int, ...]]
) -> None:
    want = apply_rotary_emb(x, table)
    with attn_backend("triton"):
        got = apply_rotary_emb(x, table)
    assert torch.equal(got, want)
    assert got.requires_grad == x.requires_grad
    assert not launches


@interpreted
def test_a_gradient_that_nobody_wants_does_not_keep_the_kernel_out(launches: list[tuple[int, ...]]) -> None:
    x, table = make_rows(3, 2, 16).requires_grad_(), make_table(torch.arange(3), 16)
    with attn_backend("triton"), torch.no_grad():
        apply_rotary_emb(x, table)
    assert len(launches) == 1
