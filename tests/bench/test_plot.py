from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from astrai_bench import plot
from astrai_bench.errors import BenchError


class RecordingAxes:
    """Remembers what was drawn."""

    def __init__(self) -> None:
        self.drawn: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.drawn.append((name, args, options))


AXES = RecordingAxes()


class RecordingFigure:
    def __init__(self, **_: Any) -> None:
        AXES.drawn.clear()

    def add_subplot(self) -> RecordingAxes:
        return AXES

    def savefig(self, path: Path) -> None:
        path.write_text("chart", encoding="utf-8")


@pytest.fixture
def _fake_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib is optional, so it is not there where the tests run."""
    package, module = ModuleType("matplotlib"), ModuleType("matplotlib.figure")
    module.Figure = RecordingFigure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)


def make_document(**medians: float) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [{"label": "cuda_ref", "status": "unavailable"}]
    for label, median in medians.items():
        rows.append(
            {
                "label": label,
                "status": "timed",
                "median_us": median,
                "p10_us": median - 1,
                "p90_us": median + 2,
            }
        )
    return {"roofline_us": 0.5, "rows": rows}


@pytest.mark.usefixtures("_fake_matplotlib")
def test_medians_are_bars_with_their_spread_and_the_roofline_a_line(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    plot.plot_documents([("this run", make_document(triton=3.0, torch_sdpa=5.0))], "decode", path)
    assert path.exists()
    calls = {name: (args, options) for name, args, options in AXES.drawn}
    args, options = calls["bar"]
    assert list(args[1]) == [3.0, 5.0]
    assert options["yerr"] == [[1, 1], [2, 2]]
    assert calls["axhline"][0] == (0.5,)
    assert calls["set_xticks"][0][1] == ["triton", "torch_sdpa"]


@pytest.mark.usefixtures("_fake_matplotlib")
def test_two_runs_stand_side_by_side(tmp_path: Path) -> None:
    runs = [("A", make_document(triton=3.0, torch_sdpa=5.0)), ("B", make_document(torch_sdpa=4.0))]
    plot.plot_documents(runs, "decode", tmp_path / "chart.png")
    bars = [args for name, args, _ in AXES.drawn if name == "bar"]
    assert bars[0][0] == pytest.approx([-0.2, 0.8])
    assert bars[1][0] == pytest.approx([1.2])


@pytest.mark.usefixtures("_fake_matplotlib")
def test_nothing_to_plot_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no provider was timed"):
        plot.plot_documents([("this run", make_document())], "decode", tmp_path / "chart.png")


def test_a_missing_matplotlib_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"--plot needs the package matplotlib.*astrai-triton\[bench\]"):
        plot.check_plotting(Path("chart.png"))


def test_an_unknown_suffix_is_refused_before_the_run() -> None:
    with pytest.raises(BenchError, match=r"wanted a file name ending in .png, .svg, .pdf, got 'chart'"):
        plot.check_plotting(Path("chart"))
