from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from astrai_triton.engine.candidates import MAX_SEARCHED
from astrai_triton.engine.sampling import (
    BaseSamplingStrategy,
    GrammarStrategy,
    LogitBiasStrategy,
    MinPStrategy,
    PenaltyStrategy,
    SamplingPipeline,
    TemperatureStrategy,
    TopKStrategy,
    TopPStrategy,
)
from sampling_paths import Path, all_paths

GONE = -math.inf
# Around the borders of the block sizes, and wide enough that blocks are searched.
WIDTHS = [1, 2, 63, 64, 65, 255, 256, 257, 700, 2100]


def logits_with_ties(width: int, num_rows: int = 3) -> torch.Tensor:
    """Multiples of 1/4 around zero, many of them equal, and both zeros."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.randint(-8, 9, (num_rows, width), generator=generator) / 4
    return torch.where(torch.rand(logits.shape, generator=generator) < 0.1, -0.0, logits)


def best(row: Sequence[float], num: int) -> set[int]:
    """Ids of the ``num`` largest; ties go to the lower id."""
    return set(sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))[:num])


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [{i for i, value in enumerate(row) if value != GONE} for row in logits.tolist()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("top_k", [1, 2, 7, 50, MAX_SEARCHED, MAX_SEARCHED + 1, 2000, 10**9])
def test_top_k_keeps_exactly_k_and_the_lower_of_equal_ids(width: int, top_k: int) -> None:
    logits = logits_with_ties(width)
    narrowed = TopKStrategy(top_k).apply(logits)
    assert kept(narrowed) == [best(row, top_k) for row in logits.tolist()]
    assert torch.equal(narrowed[narrowed != GONE], logits[narrowed != GONE])


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_off_keeps_everything_and_may_differ_by_row(off: int) -> None:
    logits = logits_with_ties(700)
    assert torch.equal(TopKStrategy(off).apply(logits), logits)
    narrowed = TopKStrategy([off, 3, 600]).apply(logits)
    assert kept(narrowed) == [best(row, k) for row, k in zip(logits.tolist(), (700, 3, 600), strict=True)]


def test_top_k_tells_neighbouring_floats_apart_at_every_size() -> None:
    for size in (1e-45, 1e-38, 1e-10, 1.0, 3e38):
        for sign in (1.0, -1.0):
            value = torch.tensor(sign * size)
            larger = value.nextafter(torch.tensor(math.inf))
            # The larger one comes last, where a tie would lose.
            logits = torch.cat((value.expand(2099), larger.reshape(1))).unsqueeze(0)
            assert kept(TopKStrategy(2).apply(logits)) == [{0, 2099}]
            assert kept(TopKStrategy(700).apply(logits)) == [{*range(699), 2099}]


def test_top_k_never_brings_back_what_is_masked() -> None:
    logits = torch.full((1, 300), GONE)
    logits[0, 299] = 1.0
    assert kept(TopKStrategy(5).apply(logits)) == [{299}]


def smallest_set(row: Sequence[float], top_p: float) -> set[int]:
    """Most likely ids whose probability reaches top_p, at least one."""
    order = sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))
    total = math.fsum(math.exp(value) for value in row)
    reached, chosen = 0.0, set()
    for token_id in order:
        chosen.add(token_id)
        reached += math.exp(row[token_id]) / total
        if reached >= top_p:
            break
    return chosen


@pytest.mark.parametrize("width", WIDTHS)
# Not near a sum of a few equal probabilities, where rounding may decide.
@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.1234567, 0.61803, 0.987654])
def test_top_p_keeps_the_smallest_set_that_reaches_p(width: int, top_p: float) -> None:
    logits = logits_with_ties(width)
    assert kept(TopPStrategy(top_p).apply(logits)) == [smallest_set(row, top_p) for row in logits.tolist()]


def test_top_p_one_keeps_everything_that_can_be_drawn() -> None:
    logits = logits_with_ties(700)
    assert torch.equal(TopPStrategy(1.0).apply(logits), logits)


def test_top_p_after_top_k_is_a_share_of_what_top_k_left() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    narrowed = SamplingPipeline([TopKStrategy(4), TopPStrategy(0.6)]).apply(logits)
    assert kept(narrowed) == [{0, 1, 2}]


def test_min_p_keeps_what_reaches_its_share_of_the_most_likely() -> None:
    logits = torch.tensor([[1.0, 0.5, 0.25, 0.125, 0.0]]).log()
    assert kept(MinPStrategy(0.25).apply(logits)) == [{0, 1, 2}]
    assert kept(MinPStrategy(0.0).apply(logits)) == [{0, 1, 2, 3}]
    assert kept(MinPStrategy([0.9]).apply(logits)) == [{0}]
    assert kept(SamplingPipeline([TopKStrategy(4), MinPStrategy(0.25)]).apply(logits)) == [{0, 1, 2}]


def test_min_p_before_top_k_and_top_p_narrows_them() -> None:
    logits = torch.tensor([[0.0, -1.0, -9.0, -9.0]])
    assert kept(SamplingPipeline([MinPStrategy(0.1), TopKStrategy(3)]).apply(logits)) == [{0, 1}]
    assert kept(SamplingPipeline([MinPStrategy(0.1), TopPStrategy(0.9999999)]).apply(logits)) == [{0, 1}]


def test_temperature_divides_and_acts_on_the_steps_after_it() -> None:
    logits = torch.tensor([[3.0, 2.0, -1.0], [3.0, 2.0, -1.0]])
    assert torch.equal(TemperatureStrategy([2.0, 0.5]).apply(logits), logits / torch.tensor([[2.0], [0.5]]))
    pipeline = SamplingPipeline([TemperatureStrategy([2.0, 0.1]), TopPStrategy(0.9)])
    assert kept(pipeline.apply(logits)) == [{0, 1}, {0}]


def test_temperatures_multiply() -> None:
    logits = torch.tensor([[3.0, 2.0, -1.0]])
    twice = SamplingPipeline([TemperatureStrategy(2.0), TemperatureStrategy(4.0)])
    assert torch.equal(twice.apply(logits), logits / 8)


def test_penalties_follow_the_published_formulas() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5]])
    penalty = PenaltyStrategy(
        [{0: 1, 1: 3}, {2: 2}], presence=[0.5, -1.0], frequency=0.25, repetition=[2.0, 1.0]
    )
    expected = [[2 / 2 - 0.5 - 0.25, -2 * 2 - 0.5 - 0.75, 1.0, 0.5], [2.0, -2.0, 1 + 1.0 - 0.5, 0.5]]
    assert penalty.apply(logits).tolist() == expected


def test_bias_is_added_and_minus_infinity_forbids() -> None:
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    biased = LogitBiasStrategy([{0: 100.0, 1: -100.0}, {}, {1: GONE}]).apply(logits)
    assert biased.tolist() == [[101.0, -98.0], [1.0, 2.0], [1.0, GONE]]


@pytest.mark.parametrize("edit", [PenaltyStrategy([{0: 1}], presence=1.0), LogitBiasStrategy([{0: 1.0}])])
def test_editing_after_the_order_is_fixed_is_an_error(edit: BaseSamplingStrategy) -> None:
    with pytest.raises(ValueError, match="edit them before top-k and top-p"):
        SamplingPipeline([TopKStrategy(2), edit]).apply(torch.zeros(1, 4))


@pytest.mark.parametrize(
    "strategy",
    [
        TemperatureStrategy(0.5),
        TopKStrategy(2),
        TopKStrategy(600),
        TopPStrategy(0.5),
        MinPStrategy(0.5),
        PenaltyStrategy([{0: 1}] * 2, presence=1.0),
        LogitBiasStrategy([{0: 1.0}] * 2),
        SamplingPipeline([TemperatureStrategy(0.5), TopKStrategy(2), TopPStrategy(0.5), MinPStrategy(0.5)]),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_apply_leaves_its_argument_alone(strategy: BaseSamplingStrategy) -> None:
    logits = logits_with_ties(700, num_rows=2)
    before = logits.clone()
    strategy.apply(logits)
    assert torch.equal(logits, before)


def test_apply_takes_bfloat16_and_gives_float32() -> None:
    narrowed = TopKStrategy(2).apply(torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.bfloat16))
    assert narrowed.dtype == torch.float32
    assert narrowed.tolist() == [[GONE, 3.0, 2.0]]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: TemperatureStrategy(0.0), "temperature"),
        (lambda: TemperatureStrategy([1.0, -1.0]), "temperature"),
        (lambda: TopKStrategy(-2), "top_k"),
        (lambda: TopPStrategy(1.1), "top_p"),
        (lambda: TopPStrategy([math.nan]), "top_p"),
        (lambda: MinPStrategy([0.5, -0.1]), "min_p"),
    ],
)
def test_a_parameter_out_of_range_names_itself(make: object, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: wanted"):
        make()  # type: ignore[operator]


@all_paths
@pytest.mark.parametrize("width", WIDTHS)
def test_a_grammar_keeps_the_tokens_of_its_bits_in_its_rows_alone(width: int, path: Path) -> None:
    logits = logits_with_ties(width, num_rows=4)
    rng = np.random.default_rng(width)
    bits = rng.integers(0, 2, (2, -(-width // 32) * 32), dtype=np.uint8)
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    with path():
        narrowed = GrammarStrategy(masks, [3, 1]).apply(logits)
    assert torch.equal(narrowed[[0, 2]], logits[[0, 2]])
    for row, allowed in zip((3, 1), bits, strict=True):
        keep = torch.from_numpy(allowed[:width]).bool()
        assert torch.equal(narrowed[row], logits[row].masked_fill(~keep, GONE))


def test_a_grammar_comes_before_the_steps_that_sort() -> None:
    masks = np.array([[0b101]], dtype=np.int32)
    logits = torch.tensor([[1.0, 9.0, 2.0]])
    narrowed = SamplingPipeline([GrammarStrategy(masks, [0]), TopKStrategy(1)]).apply(logits)
    assert kept(narrowed) == [{2}]
    with pytest.raises(ValueError, match="edit them before top-k"):
        SamplingPipeline([TopKStrategy(1), GrammarStrategy(masks, [0])]).apply(logits)
