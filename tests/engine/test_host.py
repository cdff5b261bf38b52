from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from astrai_triton.cpu.rows import NUMPY
from astrai_triton.engine import host
from astrai_triton.engine.params import SamplingParams
from astrai_triton.engine.sampling import SampleRow, SamplingPipeline
from sampling_paths import Path, sample_as_devices_do, sample_without_kernels

VOCAB = 49152
CUTS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 300, "min_p": 0.01},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 5000},
    {"top_k": 30000, "top_p": 0.99},
    {"top_p": 0.9},
    {"top_p": 0.5, "min_p": 0.1},
    {"top_p": 0.0},
    {"top_p": 1 - 2e-16},
    {"min_p": 1e-12},
    {"min_p": 0.05},
    {"min_p": 1.0},
]


def make_logits(kind: str) -> torch.Tensor:
    """One row: peaked as a language model's, flat, of few values, all equal, or masked but for a few."""
    rng = np.random.default_rng(len(kind))
    flat = rng.standard_normal(VOCAB)
    ranks = rng.permutation(VOCAB) + 1
    made: dict[str, Any] = {
        "peaked": 0.3 * flat - 1.6 * np.log(ranks) + 18,
        "flat": 2 * flat,
        "ties": np.round(2 * flat) / 2,
        "equal": np.full(VOCAB, -3.0),
        "masked": np.where(ranks < 6, flat, -np.inf),
        "huge": flat * 1e37,
    }
    return torch.from_numpy(np.asarray(made[kind], dtype=np.float32)).unsqueeze(0)


@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "equal", "masked", "huge"])
@pytest.mark.parametrize("temperature", [1e-4, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("path", [nullcontext, sample_without_kernels], ids=["host", "numpy"])
def test_a_row_of_real_width_draws_the_token_that_it_draws_on_a_device(
    kind: str, temperature: float, path: Path
) -> None:
    logits = make_logits(kind)
    rows = [
        SampleRow(SamplingParams(temperature=temperature, **{"top_k": 0, **cuts}), seed, position)
        for cuts, (seed, position) in itertools.product(CUTS, [(1, 7), (2, 3)])
    ]
    batch = logits.repeat(len(rows), 1)
    with path():
        here = SamplingPipeline()(batch, rows)
    with sample_as_devices_do():
        assert here == SamplingPipeline()(batch, rows)


@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "equal", "masked"])
@pytest.mark.parametrize("num", [1, 20, 200, 600, 3000])
def test_the_best_are_all_that_no_other_beats_and_in_order(kind: str, num: int) -> None:
    row = make_logits(kind)[0].numpy()
    expected = np.lexsort((np.arange(VOCAB), -row))[:num]
    assert np.array_equal(host.find_best(row, num), expected)


@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["peaked", "flat"])
def test_a_nucleus_is_sought_among_not_many_more_candidates(kind: str, top_p: float) -> None:
    row = make_logits(kind)[0].numpy()
    sampler = host.RowSampler(VOCAB, NUMPY)
    cuts = host.Cuts(1.0, 0, top_p, 0.0)
    top = float(row.max())
    ids = sampler.find_nucleus(row, top, cuts, float(NUMPY.sum_mass(row, top, 1.0).sum()))
    order = np.argsort(-row, kind="stable")
    shares = np.exp(row[order].astype(np.float64) - row.max())
    size = int(np.searchsorted(shares.cumsum() / shares.sum(), top_p)) + 1
    assert size <= len(ids) <= 4 * size + 256
    assert set(order[:size]) <= set(ids)


def test_a_nucleus_that_was_sought_among_too_few_is_sought_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits("flat")
    row = SampleRow(SamplingParams(temperature=1.0, top_k=0, top_p=0.9), 3, 4)
    expected = SamplingPipeline()(logits, [row])
    best = np.array([int(logits.argmax())])
    monkeypatch.setattr(host.RowSampler, "find_nucleus", lambda *_: best)
    assert SamplingPipeline()(logits, [row]) == expected
    assert expected[0].token_id != best[0]


@pytest.mark.parametrize("num_allowed", [0, 1, 30, 50, 69, 70])
def test_forbidden_logits_are_hidden_and_come_back(num_allowed: int) -> None:
    rng = np.random.default_rng(num_allowed)
    row = rng.standard_normal(70).astype(np.float32)
    before = row.copy()
    allowed = np.zeros(96, np.uint8)
    allowed[rng.permutation(70)[:num_allowed]] = 1
    restore = host.forbid(row, np.packbits(allowed, bitorder="little"))
    assert np.array_equal(row, np.where(allowed[:70], before, -np.float32(math.inf)))
    restore()
    assert np.array_equal(row, before)
