"""Joining softmax states over disjoint sets of keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from astrai_triton.ops import merge_states
from strategies import DTYPES, assert_close


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: slice, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """State of q ``[T, H, D]`` over some keys of k, v ``[L, H, D]``."""
    batch = q.shape[0]
    k, v = (tensor[None, keys].expand(batch, -1, -1, -1) for tensor in (k, v))
    out, lse = oracle.attend_dense(q[:, None], k, v, oracle.Options())
    return out[:, 0].to(dtype), lse[:, 0].float()


@settings(max_examples=20, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 3),
    heads=st.sampled_from((1, 3, 8, 40)),
    head_dim=st.sampled_from((1, 16, 40, 128)),
    cut=st.integers(0, 6),
    seed=st.integers(0, 2**16),
)
def test_two_parts_give_the_whole(
    dtype: torch.dtype, tokens: int, heads: int, head_dim: int, cut: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, head_dim, generator=generator)
    k, v = torch.randn(2, 6, heads, head_dim, generator=generator).unbind(0)
    parts = [attend(q, k, v, keys, dtype) for keys in (slice(0, cut), slice(cut, 6))]
    out, lse = merge_states(*parts[0], *parts[1])
    want, want_lse = attend(q, k, v, slice(0, 6), torch.float64)
    assert out.dtype == dtype
    assert_close(out, want)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


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
        torch.testing.assert_close(got, lse, atol=0, rtol=1e-6)


def test_strides_and_an_out_that_is_an_input() -> None:
    generator = torch.Generator().manual_seed(1)
    frame = torch.randn(3, 2, 24, generator=generator)
    o_a, o_b = frame.transpose(0, 1)[..., 4:20], torch.randn(2, 3, 16, generator=generator)
    lse_a, lse_b = torch.randn(3, 2, generator=generator).t(), torch.randn(2, 6, generator=generator)[:, ::2]
    weight = torch.sigmoid(lse_a - lse_b)[..., None]
    want = o_a * weight + o_b * (1 - weight)
    out, _ = merge_states(o_a, lse_a, o_b, lse_b, out=o_a)
    assert out is o_a
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-6)


def test_what_does_not_fit_is_an_error() -> None:
    o, lse = torch.zeros(2, 3, 16), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"o_b: wanted shape \[2, 3, 16\], got \[2, 3, 8\]"):
        merge_states(o, lse, o[..., :8], lse)
    with pytest.raises(ValueError, match=r"lse_b: wanted shape \[2, 3\], got \[3, 2\]"):
        merge_states(o, lse, o, lse.t())
    with pytest.raises(TypeError, match="lse_a: wanted one of float32, got float64"):
        merge_states(o, lse.double(), o, lse)
    with pytest.raises(ValueError, match="o_a: wanted a unit last stride"):
        merge_states(o.transpose(0, 2).contiguous().transpose(0, 2), lse, o, lse)
