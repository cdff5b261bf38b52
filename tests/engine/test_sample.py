"""``sample``: one token a row for other people's models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from astrai_triton.engine.sampling import sample


def test_sample_draws_one_int64_for_every_row_within_its_limits() -> None:
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(1))
    drawn = sample(logits, temperature=0.8, top_k=5, seed=11)
    assert drawn.dtype == torch.int64
    assert drawn.shape == (64,)
    assert (drawn.unsqueeze(1) == logits.topk(5).indices).any(1).all()
    assert torch.equal(drawn, sample(logits, temperature=0.8, top_k=5, seed=11))
    assert not torch.equal(drawn, sample(logits, temperature=0.8, top_k=5, seed=12))


def test_sample_without_a_seed_obeys_the_global_generator_of_torch() -> None:
    logits = torch.zeros(64, 500)
    torch.manual_seed(5)
    first = sample(logits)
    second = sample(logits)
    torch.manual_seed(5)
    assert torch.equal(first, sample(logits))
    assert not torch.equal(first, second)


def test_sample_is_greedy_at_temperature_0_and_takes_bfloat16() -> None:
    logits = torch.randn(8, 500).bfloat16()
    assert torch.equal(sample(logits, temperature=0), logits.float().argmax(1))


@pytest.mark.parametrize(
    ("params", "name"),
    [({"temperature": 2.01}, "temperature"), ({"top_k": -2}, "top_k"), ({"top_p": -0.1}, "top_p")],
)
def test_sample_names_a_parameter_out_of_range(params: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: wanted"):
        sample(torch.zeros(1, 5), **params)
    with pytest.raises(ValueError, match="logits: wanted"):
        sample(torch.zeros(5))
