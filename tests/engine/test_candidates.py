from __future__ import annotations

import math

import pytest
import torch

from astrai_triton.engine.candidates import MASS_ONE, Candidates, reduce_blocks, take_best, take_largest


def test_masses_are_whole_so_that_their_sums_are_exact_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    candidates = Candidates(torch.randn(1, 200_000, generator=generator) * 3)
    candidates.rescale(0.7)
    mass = candidates.mass()
    assert mass.dtype == torch.float64
    assert torch.equal(mass, mass.floor())
    assert float(mass.amax()) == MASS_ONE
    exact = sum(int(value) for value in mass[0].tolist())
    assert (
        int(mass.sum())
        == int(mass.cumsum(1)[0, -1])
        == int(mass.flip(1).view(400, 500).sum(0).sum())
        == exact
    )


def test_mass_is_the_probability_relative_to_the_most_likely() -> None:
    candidates = Candidates(torch.tensor([[1.0, 3.0, -math.inf, 2.0]]))
    expected = torch.tensor([[math.exp(-2), 1.0, 0.0, math.exp(-1)]], dtype=torch.float64)
    torch.testing.assert_close(candidates.mass() / MASS_ONE, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("num", [2, 700])
def test_ordering_keeps_the_mass_of_each_logit(num: int) -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    candidates = Candidates(logits)
    expected = candidates.mass().sort(dim=1, descending=True).values
    candidates.order(num)
    assert torch.equal(candidates.mass(), expected[:, : candidates.logits.shape[1]])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-52])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_the_ends_of_the_noise_draw_the_ends_of_what_is_left(uniform: float, is_ordered: bool) -> None:
    candidates = Candidates(torch.tensor([[-math.inf, 0.0, 0.0, 0.0, -math.inf]]))
    if is_ordered:
        candidates.order()
    expected = {0.0: 1, 0.5: 2}.get(uniform, 3)
    assert candidates.draw(torch.tensor([[uniform]], dtype=torch.float64)).tolist() == [[expected]]


def test_nan_reaches_the_top_of_ordered_candidates_whatever_its_sign() -> None:
    for num in (1, 700):
        for nan in (math.nan, -math.nan):
            logits = torch.zeros(2, 700)
            logits[1, 500] = nan
            candidates = Candidates(logits)
            candidates.order(num)
            assert candidates.top().isnan().tolist() == [[False], [True]]


@pytest.mark.parametrize("width", [1, 3, 4, 5, 8, 11])
def test_blocks_cover_every_column_and_the_last_may_be_short(width: int) -> None:
    values = torch.randn(2, width)
    expected = torch.stack([part.amax(1) for part in values.split(4, dim=1)], dim=1)
    assert torch.equal(reduce_blocks(values, 4, torch.amax), expected)


@pytest.mark.parametrize("width", [1, 255, 256, 257, 1000])
def test_the_largest_is_what_argmax_gives(width: int) -> None:
    logits = torch.randint(-3, 4, (20, width)).float()
    ids, values = take_largest(logits)
    assert torch.equal(ids.squeeze(1), logits.argmax(1))
    assert torch.equal(values.squeeze(1), logits.amax(1))


@pytest.mark.parametrize("width", [1, 20, 63, 64, 65, 2560, 2561, 5000])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999, 1.0])
def test_the_best_are_in_order_and_ties_go_to_the_lower_id_those_of_minus_infinity_too(
    width: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randint(-3, 4, (6, width), generator=generator).float()
    logits[torch.rand(logits.shape, generator=generator) < share] = -math.inf
    num = min(width, 20)
    ids, values = take_best(logits, num)
    for row, row_ids, row_values in zip(logits.tolist(), ids.tolist(), values.tolist(), strict=True):
        assert row_ids == sorted(range(width), key=lambda token_id: (-row[token_id], token_id))[:num]
        assert row_values == [row[token_id] for token_id in row_ids]
