"""Runs as a bar chart; needs matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from astrai_bench.errors import BenchError

SUFFIXES = (".png", ".svg", ".pdf")


def check_plotting(path: Path) -> None:
    """Find out before a long run whether it can be plotted to ``path``.

    Raises:
        BenchError: matplotlib is not installed, or ``path`` ends in something else than ``SUFFIXES``.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise BenchError(f"--plot: wanted a file name ending in {', '.join(SUFFIXES)}, got {path.name!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(
            "--plot needs the package matplotlib, which is not installed; "
            "pip install matplotlib, or 'astrai-triton[bench]'"
        )


def plot_documents(documents: Sequence[tuple[str, dict[str, Any]]], title: str, path: Path) -> None:
    """Write a chart of medians with their spread, and the roofline of each run, to ``path``.

    Args:
        documents: name and JSON object of each run; runs stand side by side.
        title: above the chart.
        path: its suffix, one of ``SUFFIXES``, chooses the format.

    Raises:
        BenchError: nothing was timed.
    """
    # Not pyplot: a figure of its own needs no display and leaves nothing behind.
    from matplotlib.figure import Figure

    timed = [
        (name, document, {row["label"]: row for row in document["rows"] if row["status"] == "timed"})
        for name, document in documents
    ]
    labels = list(dict.fromkeys(label for _, _, rows in timed for label in rows))
    if not labels:
        raise BenchError("--plot: no provider was timed, so there is nothing to plot")
    figure = Figure(figsize=(1.5 + 1.6 * len(labels), 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(timed)
    for idx, (name, document, rows) in enumerate(timed):
        shown = [(place, rows[label]) for place, label in enumerate(labels) if label in rows]
        places = [place + (idx - (len(timed) - 1) / 2) * width for place, _ in shown]
        medians = [row["median_us"] for _, row in shown]
        below = [row["median_us"] - row["p10_us"] for _, row in shown]
        above = [row["p90_us"] - row["median_us"] for _, row in shown]
        axes.bar(places, medians, width=width, yerr=[below, above], capsize=3, color=f"C{idx}", label=name)
        axes.axhline(
            document["roofline_us"], color=f"C{idx}", linestyle="--", linewidth=1, label=f"{name}: roofline"
        )
    axes.set_xticks(range(len(labels)), labels, rotation=15)
    axes.set_ylabel("µs per call, median and p10 to p90")
    axes.set_title(title, fontsize="small")
    axes.legend(fontsize="small")
    figure.savefig(path)
