from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from astrai_bench import timing
from astrai_bench.timing import find_percentile, measure_ceilings, plan_samples, summarise, time_calls

CPU = torch.device("cpu")


class Clock:
    """A clock that only calls move on."""

    def __init__(self) -> None:
        self.now = 100.0

    def spend(self, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.now += seconds

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def test_a_summary_holds_median_and_spread() -> None:
    result = summarise([5.0, 1.0, 2.0, 3.0, 4.0], inner=7, method="clock")
    assert (result.median, result.p10, result.p90) == (3.0, pytest.approx(1.4), pytest.approx(4.6))
    assert (result.repeats, result.inner, result.method) == (5, 7, "clock")


def test_a_percentile_of_one_sample_is_that_sample() -> None:
    assert find_percentile([2.5], 0.1) == 2.5
    with pytest.raises(ValueError, match="at least one"):
        summarise([], inner=1, method="clock")


@pytest.mark.parametrize(
    ("seconds", "repeats", "round_len", "wanted"),
    [
        (1e-3, 20, 1, (20, 20)),  # short calls are put together until a sample can be timed
        (1.0, 20, 1, (6, 1)),  # as many samples as the budget holds
        (60.0, 20, 1, (3, 1)),  # but not fewer than three
        (60.0, 2, 1, (2, 1)),  # unless fewer were asked for
        (1e-3, 20, 7, (20, 21)),  # whole rounds
        (0.5, 20, 7, (3, 7)),
        (0.0, 20, 1, (20, 1024)),  # a clock too coarse to see the call
    ],
)
def test_samples_fit_the_budget(
    seconds: float, repeats: int, round_len: int, wanted: tuple[int, int]
) -> None:
    got = plan_samples(seconds, repeats, round_len=round_len, sample_s=0.02, budget_s=6.0)
    assert got == wanted


def test_a_sample_is_the_mean_of_its_calls(clock: Clock) -> None:
    result = time_calls([clock.spend(0.004)], CPU, 9, capturable=True)
    assert (result.median, result.p10, result.p90) == pytest.approx((0.004,) * 3)
    assert (result.repeats, result.inner, result.method) == (9, 5, "clock")


def test_the_first_slow_call_does_not_count(clock: Clock) -> None:
    pending = [0.15]

    def call() -> None:
        clock.now += pending.pop() if pending else 0.05

    result = time_calls([call], CPU, 5, capturable=True)
    assert result.p90 == pytest.approx(0.05)


def test_calls_take_turns(clock: Clock) -> None:
    counts: Counter[int] = Counter()

    def make(idx: int) -> Callable[[], None]:
        def call() -> None:
            counts[idx] += 1
            clock.now += 0.5

        return call

    time_calls([make(idx) for idx in range(4)], CPU, 12, capturable=True)
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_ceilings_count_bytes_read_and_written_and_two_operations_per_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_two_seconds(calls: Any, device: torch.device, repeats: int, *, capturable: bool) -> Any:
        return summarise([2.0], inner=1, method="clock")

    monkeypatch.setattr(timing, "time_calls", take_two_seconds)
    ceilings = measure_ceilings(CPU, "float32")
    assert ceilings.bandwidth == 2 * 2**28 / 2.0
    assert ceilings.flops == 2 * 1024**3 / 2.0
    assert "copy of 256 MiB, product of 1024 x 1024 in float32" in ceilings.source
