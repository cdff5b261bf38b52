"""Joining softmax states with the kernels of cuda_ref on the host."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from cuda_ref.ops import merge_states
from strategies import DTYPES, assert_close

pytestmark = pytest.mark.usefixtures("host")


@settings(max_examples=20, deadline=None)
@given(
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    tokens=st.integers(0, 3),
    heads=st.sampled_from((1, 3, 8)),
    head_dim=st.sampled_from((1, 16, 40, 128)),
    cut=st.integers(0, 6),
    seed=st.integers(0, 2**16),
)
def test_two_parts_give_the_whole(
    dtypes: tuple[torch.dtype, torch.dtype], tokens: int, heads: int, head_dim: int, cut: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, 1, heads, head_dim, generator=generator)
    k, v = torch.randn(2, tokens, 6, heads, head_dim, generator=generator).unbind(0)
    parts = []
    for keys, dtype in zip((slice(0, cut), slice(cut, 6)), dtypes, strict=True):
        out, lse = oracle.attend_dense(q, k[:, keys], v[:, keys], oracle.Options())
        parts += [out[:, 0].to(dtype), lse[:, 0].float()]
    out, lse = merge_states(*parts)
    want, want_lse = oracle.attend_dense(q, k, v, oracle.Options())
    assert out.dtype == dtypes[0]
    # The coarser dtype of the two decides what can be expected.
    assert_close(out.to(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)), want[:, 0])
    torch.testing.assert_close(lse.double(), want_lse[:, 0], atol=1e-5, rtol=1e-5)


def test_two_states_of_nothing_give_nothing_and_their_values_are_not_read() -> None:
    out = torch.full((2, 3, 16), torch.nan)
    empty = torch.full((2, 3), -torch.inf)
    got, lse = merge_states(out, empty, out.clone(), empty, out=out)
    assert got is out
    assert torch.all(out == 0)
    assert torch.all(lse == -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_of_nothing_leaves_the_other_as_it_is(dtype: torch.dtype) -> None:
    state = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    lse = torch.tensor([[0.5, -90.0, 80.0]] * 2)
    nothing = torch.full((2, 3, 16), torch.nan, dtype=dtype), torch.full((2, 3), -torch.inf)
    for out, got in (merge_states(state, lse, *nothing), merge_states(*nothing, state, lse)):
        assert torch.equal(out, state)
        assert torch.equal(got, lse)


def test_strides_and_an_out_that_is_an_input() -> None:
    generator = torch.Generator().manual_seed(1)
    frame = torch.randn(3, 2, 24, generator=generator)
    before, o_a = frame.clone(), frame.transpose(0, 1)[..., 4:20]
    o_b = torch.randn(2, 3, 16, generator=generator)
    lse_a, lse_b = torch.randn(3, 2, generator=generator).t(), torch.randn(2, 6, generator=generator)[:, ::2]
    weight = torch.sigmoid(lse_a - lse_b)[..., None]
    want = o_a * weight + o_b * (1 - weight)
    out, _ = merge_states(o_a, lse_a, o_b, lse_b, out=o_a)
    assert out is o_a
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-6)
    assert torch.equal(frame[..., :4], before[..., :4])
    assert torch.equal(frame[..., 20:], before[..., 20:])


def test_what_does_not_fit_is_an_error() -> None:
    o, lse = torch.zeros(2, 3, 16), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"o_b: wanted shape \[2, 3, 16\], got \[2, 3, 8\]"):
        merge_states(o, lse, o[..., :8], lse)
    with pytest.raises(ValueError, match=r"lse_b: wanted shape \[2, 3\], got \[3, 2\]"):
        merge_states(o, lse, o, lse.t())
    with pytest.raises(TypeError, match="lse_a: wanted one of float32, got float64"):
        merge_states(o, lse.double(), o, lse)
    with pytest.raises(ValueError, match="o_a: wanted a head_dim from 1 to 256, got 264"):
        merge_states(torch.zeros(2, 3, 264), lse, torch.zeros(2, 3, 264), lse)
