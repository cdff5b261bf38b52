from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_triton.engine.noise import uniform
from astrai_triton.engine.params import SamplingParams
from astrai_triton.engine.sampling import (
    SampledToken,
    SampleRow,
    SamplingPipeline,
    TopKStrategy,
)
from sampling_paths import Path, all_paths, sample_as_devices_do

GONE = -math.inf
# float32 scores and masses rounded to 2^-32 move a border by less than this; so does one step of the noise.
TOLERANCE = 2e-6


class FirstTokens:
    """Allows tokens 0 to 31."""

    def fill_mask(self, mask: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        mask[:] = 0
        mask[0] = -1


def tokens(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    return [sampled.token_id for sampled in SamplingPipeline()(logits, rows)]


def row_of(position: int = 0, seed: int = 0, **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(**params), seed, position)


def edited(logits: Sequence[float], row: SampleRow) -> list[float]:
    """Logits after penalties, bias and suppression."""
    params, values = row.params, list(logits)
    for token_id, count in row.counts.items():
        scaled = values[token_id] / params.repetition_penalty
        if values[token_id] <= 0:
            scaled = values[token_id] * params.repetition_penalty
        values[token_id] = scaled - params.presence_penalty - params.frequency_penalty * count
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    for token_id in row.suppressed:
        values[token_id] = GONE
    return values


def reference(logits: Sequence[float], row: SampleRow) -> set[int]:
    """What a plain float64 sampler draws, for noise and borders within the tolerance. {-1}: not finite."""
    params, values = row.params, edited(logits, row)
    if any(math.isnan(value) or value == math.inf for value in logits) or max(values) == GONE:
        return {-1}
    order = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    if params.is_greedy:
        return {order[0]}
    limit = params.top_k if 0 < params.top_k < len(values) else len(values)
    is_ordered = limit < len(values) or params.top_p < 1.0
    scores = [(values[token_id] - values[order[0]]) / params.temperature for token_id in order[:limit]]
    likelihood = [math.exp(score) for score in scores]
    noise, total, drawn = uniform(row.seed, row.position), math.fsum(likelihood), set()
    for slack in (-TOLERANCE, 0.0, TOLERANCE):
        kept, before = [], 0.0
        for token_id, share in zip(order, likelihood, strict=False):
            if kept and params.top_p < 1.0 and before >= (params.top_p + slack) * total:
                break
            before += share
            if share >= params.min_p * (1 + slack):
                kept.append((token_id, share))
        kept = kept if is_ordered else sorted(kept)
        mass, reached = math.fsum(share for _, share in kept), 0.0
        for token_id, share in kept:
            low, reached = reached / mass, reached + share
            if low - TOLERANCE <= noise <= reached / mass + TOLERANCE:
                drawn.add(token_id)
    return drawn


@st.composite
def sample_rows(draw: st.DrawFn, width: int) -> SampleRow:
    """Parameters on grids, so that edits of grid logits are exact in float32; every route and extreme."""
    ids = st.integers(0, width - 1)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-30, 1e-4, 0.5, 0.7, 1.0, 2.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 5, 16, 50, 600, width, width + 1])),
        top_p=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.25, 2.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 2.0, 0.5])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([-100.0, -0.5, 1.0, 100.0]), max_size=3)),
        logprobs=(num_top := draw(st.sampled_from([None, 0, 0, 1, 20]))) is not None,
        top_logprobs=num_top or 0,
    )
    return SampleRow(
        params,
        seed=draw(st.integers(-(2**63), 2**64)),
        position=draw(st.integers(0, 2**20)),
        counts=draw(st.dictionaries(ids, st.integers(1, 4), max_size=4)) if params.has_penalties else {},
        suppressed=draw(st.lists(ids, max_size=2)),
    )


@st.composite
def batches(draw: st.DrawFn, num_rows: int = 8) -> tuple[torch.Tensor, list[SampleRow]]:
    """Logits that are multiples of 1/8 with many ties, some masked, some rows not finite."""
    width = draw(st.sampled_from([1, 2, 5, 64, 65, 255, 256, 257, 700, 2100]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num = draw(st.integers(1, num_rows))
    logits = rng.integers(-40, 41, (num, width)).astype(np.float32) / 8
    logits[rng.random(logits.shape) < draw(st.sampled_from([0.0, 0.2, 0.99]))] = GONE
    for row_idx in range(num):
        poison = draw(st.sampled_from([None, None, None, None, None, math.nan, -math.nan, math.inf, GONE]))
        if poison == GONE:
            logits[row_idx] = GONE
        elif poison is not None:
            logits[row_idx, rng.integers(width)] = poison
    return torch.from_numpy(logits), [draw(sample_rows(width)) for _ in range(num)]


@all_paths
@settings(deadline=None, max_examples=70)
@given(batch=batches())
def test_every_row_of_a_mixed_batch_draws_what_a_plain_float64_sampler_draws(
    path: Path, batch: tuple[torch.Tensor, list[SampleRow]]
) -> None:
    logits, rows = batch
    before = logits.clone()
    with path():
        sampled = SamplingPipeline()(logits, rows)
    for values, row, got in zip(before.tolist(), rows, sampled, strict=True):
        assert got.token_id in reference(values, row), row
        if got.token_id < 0 or not row.params.logprobs:
            assert (got.logprob, got.top) == (None, ())
        else:
            expected = values[got.token_id] - max(values)
            expected -= math.log(math.fsum(math.exp(value - max(values)) for value in values))
            assert got.logprob == pytest.approx(expected, abs=1e-6)
            assert len(got.top) == min(row.params.top_logprobs, len(values))
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


@all_paths
@settings(deadline=None, max_examples=50)
@given(batch=batches())
def test_a_row_alone_is_bit_for_bit_the_row_in_a_batch(
    path: Path, batch: tuple[torch.Tensor, list[SampleRow]]
) -> None:
    logits, rows = batch
    with path():
        together = SamplingPipeline()(logits, rows)
        alone = [SamplingPipeline()(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    assert together == alone


@all_paths
def test_a_row_of_real_width_does_not_depend_on_its_batch(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    # Logits of a bfloat16 model: many are equal.
    logits = (torch.randn(8, 49152, generator=generator) * 3).bfloat16().float()
    mix: list[dict[str, Any]] = [
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"temperature": 0},
        {"top_k": 49, "top_p": 0.5},
    ]
    mix += [{"min_p": 0.01}, {"top_k": 5000}, {"temperature": 0.3, "logit_bias": {5: 3.0}}]
    for step in range(3):
        rows = [
            row_of(step, seed=i, logprobs=True, top_logprobs=i % 3 * 10, **mix[(i + step) % 8])
            for i in range(8)
        ]
        with path():
            together = SamplingPipeline()(logits, rows)
            alone = [SamplingPipeline()(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        assert together == alone


def chi_square(drawn: Sequence[int], shares: Sequence[float]) -> float:
    counts = Counter(drawn)
    assert all(shares[token_id] > 0 for token_id in counts)
    expected = [share / sum(shares) * len(drawn) for share in shares]
    return sum((counts[i] - mean) ** 2 / mean for i, mean in enumerate(expected) if mean > 0)


@pytest.mark.parametrize(
    ("params", "shares"),
    [
        ({}, [8, 4, 2, 1, 1, 4, 8, 4]),
        ({"temperature": 0.5}, [64, 16, 4, 1, 1, 16, 64, 16]),
        ({"top_k": 4}, [8, 4, 0, 0, 0, 4, 8, 0]),
        ({"top_p": 0.7}, [8, 4, 0, 0, 0, 4, 8, 0]),
        ({"min_p": 0.25}, [8, 4, 2, 0, 0, 4, 8, 4]),
        ({"top_k": 6, "top_p": 0.6, "min_p": 0.9}, [8, 0, 0, 0, 0, 0, 8, 0]),
        ({"logit_bias": {3: math.log(8)}}, [8, 4, 2, 8, 1, 4, 8, 4]),
    ],
)
def test_draws_over_positions_and_over_seeds_follow_the_probabilities(
    params: dict[str, Any], shares: list[float]
) -> None:
    logits = torch.tensor([8.0, 4, 2, 1, 1, 4, 8, 4]).log().expand(3000, 8).contiguous()
    # Seven degrees of freedom at most: above 40.5 once in a million.
    assert chi_square(tokens(logits, [row_of(n, 3, **params) for n in range(3000)]), shares) < 40.5
    assert chi_square(tokens(logits, [row_of(3, n, **params) for n in range(3000)]), shares) < 40.5


def test_the_same_seed_and_position_draw_the_same_token_and_others_do_not() -> None:
    logits = torch.zeros(1, 1000).expand(6, 1000).contiguous()
    first, again, *others = tokens(
        logits, [row_of(4, 7), row_of(4, 7), row_of(5, 7), row_of(6, 7), row_of(4, 8), row_of(4, 9)]
    )
    assert first == again
    assert first not in others


@pytest.mark.parametrize("width", [3, 256, 300, 49152])
def test_greedy_takes_the_lowest_of_equal_ids_wherever_they_lie(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.full((50, width), -1.0)
    expected = []
    for row in logits:
        ids = torch.randint(width, (3,), generator=generator)
        row[ids] = 2.5
        expected.append(int(ids.min()))
    assert tokens(logits, [row_of(temperature=0)] * 50) == expected
    assert tokens(torch.tensor([[-1.0, -0.0, 0.0]]), [row_of(temperature=0)]) == [1]


def test_frequency_2_at_temperature_0_changes_the_choice() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0]])
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    assert tokens(logits, [SampleRow(params, 0, 3, counts={})]) == [0]
    assert tokens(logits, [SampleRow(params, 0, 3, counts={0: 1})]) == [1]
    assert tokens(logits, [SampleRow(params, 0, 3, counts={0: 3, 1: 3})]) == [2]


def test_counts_without_a_penalty_change_nothing() -> None:
    assert tokens(torch.tensor([[5.0, 4.9]]), [SampleRow(SamplingParams(temperature=0), 0, 0, {0: 99})]) == [
        0
    ]


def test_greedy_honours_bias_and_suppression_and_suppression_beats_bias() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0]] * 3)
    biased = SamplingParams(temperature=0, logit_bias={2: 6.0})
    rows = [row_of(temperature=0), SampleRow(biased, 0, 0), SampleRow(biased, 0, 0, suppressed=(2, 0))]
    assert tokens(logits, rows) == [0, 2, 1]


@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_extreme_bias_beside_a_sampled_row_disturbs_neither(bias: float) -> None:
    logits = torch.linspace(-3, 3, 500).repeat(2, 1)
    rows = [row_of(1, 5, logit_bias={7: bias}, logprobs=True), row_of(1, 5, logprobs=True)]
    first, second = SamplingPipeline()(logits, rows)
    assert (first.token_id == 7) == (bias > 0)
    assert first.logprob is not None
    assert math.isfinite(first.logprob)
    assert [second] == SamplingPipeline()(logits[1:], rows[1:])


@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 600}, {}, {"min_p": 0.5}]
)
def test_a_row_that_is_not_finite_gives_minus_1_and_its_neighbours_are_as_without_it(
    poison: float, params: dict[str, Any]
) -> None:
    logits = torch.linspace(-3, 3, 1000).repeat(3, 1)
    rows = [row_of(position, 5, logprobs=True, **params) for position in range(3)]
    healthy = SamplingPipeline()(logits, rows)
    logits[1, 900] = poison
    assert SamplingPipeline()(logits, rows) == [healthy[0], SampledToken(-1), healthy[2]]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 600}, {}])
def test_minus_infinity_is_a_mask_unless_nothing_else_is_left(params: dict[str, Any]) -> None:
    logits = torch.full((2, 1000), GONE)
    logits[0, 777] = -5.0
    assert tokens(logits, [row_of(**params)] * 2) == [777, -1]


def test_top_p_0_keeps_one_token() -> None:
    logits = torch.tensor([[1.0, 1.5, 1.5]] * 40)
    assert set(tokens(logits, [row_of(n, top_p=0.0) for n in range(40)])) == {1}
    assert set(tokens(logits, [row_of(n, top_p=0.0, top_k=2) for n in range(40)])) == {1}


@pytest.mark.parametrize("top_k", [0, -1, 3, 10**9])
def test_top_k_off_or_beyond_the_vocabulary_draws_from_all(top_k: int) -> None:
    drawn = tokens(torch.zeros(200, 3), [row_of(n, top_k=top_k) for n in range(200)])
    assert set(drawn) == {0, 1, 2}


@pytest.mark.parametrize(
    ("temperature", "expected"), [(0.0, {1}), (1e-30, {1}), (1e-4, {1}), (2.0, {0, 1, 2})]
)
def test_extreme_temperatures_neither_overflow_nor_vanish(temperature: float, expected: set[int]) -> None:
    logits = torch.tensor([[88.0, 89.0, 88.5]] * 200)
    for more in ({}, {"top_k": 3}, {"top_p": 0.9999}):
        assert (
            set(tokens(logits, [row_of(n, temperature=temperature, **more) for n in range(200)])) == expected
        )


def test_huge_logits_are_sampled_without_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 3e38]] * 100)
    for more in ({}, {"top_k": 2}, {"top_p": 0.9}, {"temperature": 1e-4}):
        assert set(tokens(logits, [row_of(n, **more) for n in range(100)])) == {0, 2}


def test_logprob_is_of_the_raw_distribution_whatever_was_cut_or_biased() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0, 1.0]]).log()
    for params in ({}, {"temperature": 0.3}, {"top_k": 1}, {"logit_bias": {0: 100.0}}, {"top_p": 0.1}):
        (sampled,) = SamplingPipeline()(logits, [row_of(2, 3, logprobs=True, **params)])
        assert sampled.logprob == pytest.approx(float(logits[0, sampled.token_id]) - math.log(8), abs=1e-6)


def test_a_step_reads_the_device_once_whatever_the_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    original = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        reads.append(tensor.shape)
        return original(tensor)

    def refuse(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"a second read, of {tuple(tensor.shape)}")

    logits = torch.randn(6, 1000)
    mix: list[dict[str, Any]] = [
        {"temperature": 0},
        {"top_k": 5},
        {"top_p": 0.5},
        {"top_k": 700},
        {},
        {"min_p": 0.1},
    ]
    rows = [
        row_of(n, logprobs=n % 2 == 0, top_logprobs=5 * (n == 2), logit_bias={1: 2.0}, **params)
        for n, params in enumerate(mix)
    ]
    rows[1].matcher = FirstTokens()  # type: ignore[assignment]
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    for name in ("item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with sample_as_devices_do():
        SamplingPipeline()(logits, rows)
    assert len(reads) == 1


def test_no_rows_give_no_tokens_and_a_wrong_number_is_an_error() -> None:
    assert SamplingPipeline()(torch.empty(0, 7), []) == []
    with pytest.raises(ValueError, match=r"rows: wanted one for each row of logits \(2, 7\), got 1"):
        SamplingPipeline()(torch.zeros(2, 7), [row_of()])


def test_steps_of_a_pipeline_come_before_those_the_rows_ask_for() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 50)
    rows = [row_of(n, logit_bias={0: -100.0}) for n in range(50)]
    drawn = {token.token_id for token in SamplingPipeline([TopKStrategy(2)])(logits, rows)}
    assert drawn == {1}
