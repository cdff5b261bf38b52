"""What people see while a model loads: bars on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

FIRST_LINE_S = 2.0
NEXT_LINE_S = 10.0


class LoadDisplay:
    """Shows how far long work is; a context manager. One thread at a time reports.

    Args:
        stream: where to write, usually stderr; bars appear if it is a terminal.
        is_quiet: write nothing at all.
    """

    def __init__(self, stream: IO[str], *, is_quiet: bool = False) -> None:
        self._console = Console(file=stream, quiet=is_quiet, highlight=False, soft_wrap=True, markup=False)
        self._bars: Progress | None = None
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                DownloadColumn(),
                TimeRemainingColumn(compact=True),
                console=self._console,
                transient=True,
            )
        self._phase = ""
        self._bar: TaskID | None = None
        self._next_line_s = 0.0

    def __enter__(self) -> LoadDisplay:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bars away; lines can still be written."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def say(self, line: str) -> None:
        """Write one line above the bars."""
        self._console.print(line)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Note how far a phase is; the ``checkpoint.Progress`` of the library.

        Args:
            phase: what is going on; a new one replaces the bar of the one before.
            done: bytes done.
            total: bytes to do, 0 if unknown.
        """
        if self._bars is not None:
            self._draw(self._bars, phase, done, total)
            return
        now = time.monotonic()
        if phase != self._phase:
            # Work that is over soon is not worth a line.
            self._phase, self._next_line_s = phase, now + FIRST_LINE_S
        elif now >= self._next_line_s:
            self._next_line_s = now + NEXT_LINE_S
            share = f": {done / total:.0%} of {total / 2**20:.0f} MiB" if total else ""
            self.say(f"{phase}{share}")

    def _draw(self, bars: Progress, phase: str, done: int, total: int) -> None:
        if phase != self._phase or self._bar is None:
            if self._bar is not None:
                bars.remove_task(self._bar)
            self._phase, self._bar = phase, bars.add_task(phase, total=None)
        bars.update(self._bar, completed=done, total=total or None)
