"""A load as a chart: how latencies are distributed, and what came when. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from astrai_bench.errors import BenchError
from astrai_bench.load import Run
from astrai_bench.serve_report import collect_latencies

_TITLES = (("ttft_ms", "first token"), ("itl_ms", "between chunks"), ("latency_ms", "request"))
_MOST_BINS, _BIN_S = 60, 0.5


def bin_tokens(run: Run) -> tuple[list[float], list[float]]:
    """Starts of equal stretches of the run in seconds, and output tokens a second in each.

    Tokens of an answer are spread evenly over its chunks. Answers that failed count with what they brought.
    """
    wall_s = run.ended_s - run.started_s
    num_bins = max(1, min(_MOST_BINS, int(wall_s / _BIN_S)))
    width = wall_s / num_bins
    counts = [0.0] * num_bins
    for answer in run.answers:
        weight = answer.num_tokens / len(answer.chunks_s) if answer.chunks_s else 0.0
        for at in answer.chunks_s:
            counts[min(num_bins - 1, int((at - run.started_s) / width))] += weight
    return [idx * width for idx in range(num_bins)], [count / width for count in counts]


def plot_run(run: Run, title: str, path: Path) -> None:
    """Write the distribution of latencies and the throughput over time to ``path``.

    Args:
        run: at least one request of it was answered.
        title: above the chart.
        path: its suffix chooses the format; see ``plot.check_plotting``.

    Raises:
        BenchError: no request was answered.
    """
    # Not pyplot: a figure of its own needs no display and leaves nothing behind.
    from matplotlib.figure import Figure

    good = [answer for answer in run.answers if answer.error is None]
    if not good:
        raise BenchError("--plot: no request was answered, so there is nothing to plot")
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    shares, rates = figure.subplots(1, 2)
    latencies = collect_latencies(good)
    for name, label in _TITLES:
        times = sorted(latencies[name])
        if times:
            steps = [(idx + 1) / len(times) for idx in range(len(times))]
            shares.step([time * 1e3 for time in times], steps, where="post", label=label)
    _label(shares, "ms", "share at most this", "latency")
    shares.set_xscale("log")
    shares.legend(fontsize="small")
    starts, counts = bin_tokens(run)
    # The last stretch is drawn to its end.
    rates.step([*starts, run.ended_s - run.started_s], [*counts, counts[-1]], where="post")
    rates.set_ylim(0, 1.1 * max(counts))
    _label(rates, "s since the start", "output tok/s", "throughput")
    figure.suptitle(title, fontsize="small")
    figure.savefig(path)


def _label(axes: Any, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize="small")
    axes.grid(visible=True, alpha=0.3)
