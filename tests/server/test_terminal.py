from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from astrai_server import terminal
from astrai_server.terminal import LoadDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One element: the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_file_gets_a_line_now_and_then(clock: list[float]) -> None:
    stream = io.StringIO()
    with LoadDisplay(stream) as display:
        for second in range(31):
            clock[0] = 100.0 + second
            display.progress("fetching x", second << 20, 30 << 20)
    assert stream.getvalue().splitlines() == [
        "fetching x: 7% of 30 MiB",
        "fetching x: 40% of 30 MiB",
        "fetching x: 73% of 30 MiB",
    ]


def test_short_phases_are_not_worth_a_line(clock: list[float]) -> None:
    stream = io.StringIO()
    with LoadDisplay(stream) as display:
        for phase in ("verifying", "unpacking", "loading"):
            display.progress(phase, 0, 10)
            clock[0] += 1.0
            display.progress(phase, 10, 10)
    assert stream.getvalue() == ""


def test_work_of_unknown_size_has_no_share(clock: list[float]) -> None:
    stream = io.StringIO()
    with LoadDisplay(stream) as display:
        display.progress("waiting", 0, 0)
        clock[0] += 3.0
        display.progress("waiting", 0, 0)
    assert stream.getvalue() == "waiting\n"


def test_lines_are_written_as_they_are_and_unwrapped() -> None:
    stream = io.StringIO()
    line = "[bold]curl[/bold] " + "x" * 300
    with LoadDisplay(stream) as display:
        display.say(line)
    assert stream.getvalue() == line + "\n"


def test_a_quiet_display_writes_nothing(clock: list[float]) -> None:
    stream = io.StringIO()
    with LoadDisplay(stream, is_quiet=True) as display:
        display.say("hello")
        display.progress("fetching", 1, 2)
        clock[0] += 60.0
        display.progress("fetching", 1, 2)
    assert stream.getvalue() == ""


def test_a_terminal_gets_bars_that_go_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with LoadDisplay(stream) as display:
        display.progress("fetching x", 1 << 20, 2 << 20)
        display.progress("loading x", 0, 0)
        display.say("model x")
        display.close()
        display.say("ready")
        display.progress("later", 1, 2)
    text = stream.getvalue()
    assert "loading x" in text
    assert text.index("model x") < text.index("ready")
    assert text.endswith("ready\n")
