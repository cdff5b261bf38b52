"""How long calls take: CUDA events or the clock, medians and spread, and the ceilings of the machine."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import attrs
import torch

from astrai_bench.cases import Ceilings

Call = Callable[[], object]

_WARM_UP_S = 0.2
_CPU_SAMPLE_S = 0.02
"""Shorter samples measure the clock and the scheduler of the machine."""
_GPU_SAMPLE_S = 0.002
_CPU_BUDGET_S = 6.0
_GPU_BUDGET_S = 2.0
_MIN_REPEATS = 3
_MAX_INNER = 1024


@attrs.frozen(kw_only=True)
class Timing:
    """Seconds of one call."""

    median: float
    p10: float
    p90: float
    repeats: int
    """Samples taken."""
    inner: int
    """Calls per sample; a sample is their mean."""
    method: str
    """``clock``, ``events`` (what the stream took, launches included) or ``graph`` (the device alone), or why
    there is no graph."""


def summarise(samples: Sequence[float], inner: int, method: str) -> Timing:
    """Median, 10th and 90th percentile of ``samples``, which are seconds per call.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("samples: wanted at least one, got none")
    return Timing(
        median=statistics.median(samples),
        p10=find_percentile(samples, 0.1),
        p90=find_percentile(samples, 0.9),
        repeats=len(samples),
        inner=inner,
        method=method,
    )


def find_percentile(samples: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    ranked = sorted(samples)
    place = share * (len(ranked) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def plan_samples(
    seconds: float, repeats: int, *, round_len: int, sample_s: float, budget_s: float
) -> tuple[int, int]:
    """Samples to take and calls in each.

    Args:
        seconds: what one call takes, roughly.
        repeats: samples wanted.
        round_len: a sample holds a multiple of so many calls.
        sample_s: the shortest sample that can be timed well.
        budget_s: what all samples may take; fewer are taken where calls are too long for that, but at least
            three of those wanted.

    Returns:
        ``repeats`` and ``inner``, both at least 1.
    """
    seconds = max(seconds, 1e-9)
    wanted = min(_MAX_INNER, max(1, math.ceil(sample_s / seconds)))
    inner = math.ceil(wanted / round_len) * round_len
    affordable = int(budget_s / (inner * seconds))
    return max(min(repeats, affordable), min(repeats, _MIN_REPEATS)), inner


def time_calls(calls: Sequence[Call], device: torch.device, repeats: int, *, capturable: bool) -> Timing:
    """Time ``calls``, which do the same on different memory, round and round.

    Args:
        calls: at least one; each is called several times.
        device: where they run.
        repeats: samples wanted; slow calls get fewer, at least 3.
        capturable: whether to try a CUDA graph, in which launches cost nothing.
    """
    if device.type == "cuda":
        return _time_cuda(calls, device, repeats, capturable)
    return _time_clock(calls, repeats)


def _time_clock(calls: Sequence[Call], repeats: int) -> Timing:
    seconds = _warm_up(calls, lambda: None)
    repeats, inner = plan_samples(
        seconds, repeats, round_len=1, sample_s=_CPU_SAMPLE_S, budget_s=_CPU_BUDGET_S
    )
    samples, turn = [], 0
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(inner):
            calls[turn]()
            turn = (turn + 1) % len(calls)
        samples.append((time.perf_counter() - started) / inner)
    return summarise(samples, inner, "clock")


def _warm_up(calls: Sequence[Call], synchronise: Callable[[], None]) -> float:
    """Run for a while; returns the seconds of the fastest call, so that one slow start does not mislead."""
    fastest, spent, turn = math.inf, 0.0, 0
    while turn < 2 or (spent < _WARM_UP_S and turn < _MAX_INNER):
        started = time.perf_counter()
        calls[turn % len(calls)]()
        synchronise()
        taken = time.perf_counter() - started
        fastest, spent, turn = min(fastest, taken), spent + taken, turn + 1
    return fastest


def _time_cuda(calls: Sequence[Call], device: torch.device, repeats: int, capturable: bool) -> Timing:
    with torch.cuda.device(device):
        seconds = _warm_up(calls, torch.cuda.synchronize)
        # A graph that held half a round would leave the other half of the memory alone.
        repeats, inner = plan_samples(
            seconds, repeats, round_len=len(calls), sample_s=_GPU_SAMPLE_S, budget_s=_GPU_BUDGET_S
        )
        round_of_calls, method = _chain(calls, inner), "events"
        if capturable:
            try:
                round_of_calls, method = _capture(calls, inner), "graph"
            except RuntimeError as error:
                # Which calls of other packages can be captured changes with their versions.
                method = f"events, as a graph cannot hold it: {str(error).splitlines()[0][:80]}"
        round_of_calls()
        marks = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(repeats + 1)
        ]
        # One mark between two samples: the queue never runs dry, so no sample waits for the host to begin.
        for mark in marks[:-1]:
            mark.record()
            round_of_calls()
        marks[-1].record()
        torch.cuda.synchronize()
        samples = [start.elapsed_time(end) * 1e-3 / inner for start, end in itertools.pairwise(marks)]
    return summarise(samples, inner, method)


def _chain(calls: Sequence[Call], inner: int) -> Call:
    """``inner`` calls, each time going on where the last round ended."""
    turn = 0

    def run() -> None:
        nonlocal turn
        for _ in range(inner):
            calls[turn]()
            turn = (turn + 1) % len(calls)

    return run


def _capture(calls: Sequence[Call], inner: int) -> Call:
    """A CUDA graph of at least one whole round of ``calls``."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _chain(calls, inner)()
    return graph.replay


def measure_ceilings(device: torch.device, dtype: str) -> Ceilings:
    """Copy bandwidth, and the rate of a square matrix product in ``dtype``, of this machine now."""
    is_gpu = device.type == "cuda"
    num_bytes = 1 << (30 if is_gpu else 28)
    side = 8192 if is_gpu else 1024
    copying = _time_copy(num_bytes, device)
    multiplying = _time_product(side, dtype, device)
    # The fastest samples: a ceiling is what the machine can do, not what it did while it was disturbed.
    return Ceilings(
        bandwidth=2 * num_bytes / copying.p10,
        flops=2 * side**3 / multiplying.p10,
        source=f"measured in this run: copy of {num_bytes >> 20} MiB, product of {side} x {side} in {dtype}",
    )


def _time_copy(num_bytes: int, device: torch.device) -> Timing:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return time_calls([lambda: target.copy_(source)], device, 10, capturable=True)


def _time_product(side: int, dtype: str, device: torch.device) -> Timing:
    a, b = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
    product = torch.empty_like(a)
    return time_calls([lambda: torch.mm(a, b, out=product)], device, 10, capturable=True)
