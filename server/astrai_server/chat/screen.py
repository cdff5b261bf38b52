"""Where answers and everything else is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from astrai_server.chat.control import ControlFilter, strip_controls
from astrai_server.chat.markdown import MarkdownBlocks, Tail
from astrai_server.chat.reply import Delta

REDRAW_S = 0.08
_REDRAW_SHARE = 4
"""Time between two redraws, as a multiple of the time that one takes."""


class AnswerView(Protocol):
    """Shows one answer; a context manager around its arrival."""

    def __enter__(self) -> AnswerView: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def add(self, delta: Delta) -> None:
        """Take in a piece."""

    def redraw(self) -> None:
        """Show what has not been shown yet, and that time passes; to be called every ``REDRAW_S``."""


class Screen:
    """Answers go to stdout, everything else to stderr.

    Args:
        stdout: gets Markdown that is redrawn as it grows if it is a terminal that can, else plain text.
        stderr: gets statistics, errors, replies to commands, and reasoning where stdout gets plain text.
        is_plain: no Markdown in any case.
        is_quiet: no reasoning, and nothing on stderr but errors and replies to commands.
    """

    def __init__(
        self, stdout: IO[str], stderr: IO[str], *, is_plain: bool = False, is_quiet: bool = False
    ) -> None:
        self._stdout = stdout
        self._out = _make_console(stdout, soft_wrap=False)
        self._err = _make_console(stderr, soft_wrap=True)
        self._is_quiet = is_quiet
        # Not the console's own opinion: FORCE_COLOR makes it take a pipe for a terminal.
        self._is_live = stdout.isatty() and not self._out.is_dumb_terminal and not is_plain

    def say(self, text: str) -> None:
        """A reply to a command."""
        self._err.print(strip_controls(text))

    def note(self, text: str) -> None:
        """Something that need not be read."""
        if not self._is_quiet:
            self._err.print(strip_controls(text), style="dim")

    def fail(self, text: str) -> None:
        """An error, on one line."""
        self._err.print(Text.assemble(("error: ", "bold red"), " ".join(strip_controls(text).split())))

    def show_answer(self) -> AnswerView:
        """A view for the next answer."""
        if self._is_live:
            return _LiveView(self._out, has_reasoning=not self._is_quiet)
        return _PlainView(self._stdout, None if self._is_quiet else self._err)


class _PlainView:
    """Text as it comes."""

    def __init__(self, stdout: IO[str], err: Console | None) -> None:
        self._stdout = stdout
        self._err = err
        self._text, self._reasoning = ControlFilter(), ControlFilter()
        self._is_reasoning = False
        self._ends_line = True

    def __enter__(self) -> _PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_reasoning()
        if not self._ends_line and not isinstance(error, BrokenPipeError):
            self._stdout.write("\n")
            self._stdout.flush()

    def add(self, delta: Delta) -> None:
        reasoning = self._reasoning.feed(delta.reasoning)
        if reasoning and self._err is not None:
            self._err.out(reasoning, style="dim", end="", highlight=False)
            self._is_reasoning = True
        text = self._text.feed(delta.text)
        if text:
            self._end_reasoning()
            self._stdout.write(text)
            self._stdout.flush()
            self._ends_line = text.endswith("\n")

    def redraw(self) -> None:
        # Nothing is held back.
        pass

    def _end_reasoning(self) -> None:
        if self._is_reasoning and self._err is not None:
            self._err.out("\n")
            self._is_reasoning = False


class _LiveView:
    """Markdown: what is done scrolls away, what still grows is redrawn below it."""

    def __init__(self, console: Console, *, has_reasoning: bool) -> None:
        self._console = console
        self._has_reasoning = has_reasoning
        self._text, self._reasoning = ControlFilter(), ControlFilter()
        self._thought = ""
        """Reasoning that is not done."""
        self._blocks = MarkdownBlocks()
        self._has_text = self._is_continued = self._is_drawn = False
        self._started_s = self._next_s = 0.0
        self._spinner = Spinner("dots" if console.encoding.startswith("utf") else "line", style="dim")
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def __enter__(self) -> _LiveView:
        self._started_s = time.monotonic()
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._console:
            self._print_thought(self._thought)
            self._print_blocks(self._blocks.take_rest())
            self._live.update(Group(), refresh=True)
        self._live.stop()

    def add(self, delta: Delta) -> None:
        if self._has_reasoning:
            self._thought += self._reasoning.feed(delta.reasoning)
        text = self._text.feed(delta.text)
        self._has_text = self._has_text or bool(text)
        self._blocks.feed(text)
        self._is_drawn = False

    def redraw(self) -> None:
        started_s = time.monotonic()
        if self._is_drawn or started_s < self._next_s:
            return
        # One write for all of it, or the region would flicker.
        with self._console:
            if self._has_text:
                self._print_thought(self._thought)
                self._print_blocks(self._blocks.take_done())
            else:
                self._print_thought(self._thought[: self._thought.rfind("\n") + 1])
            self._live.update(self._make_tail(), refresh=True)
        # The spinner turns as long as there is nothing else.
        self._is_drawn = self._has_text or bool(self._thought)
        now_s = time.monotonic()
        self._next_s = now_s + max(REDRAW_S, _REDRAW_SHARE * (now_s - started_s))

    def _make_tail(self) -> RenderableType:
        if self._has_text:
            return Tail(self._blocks.show_rest(), is_continued=self._is_continued)
        if self._thought or self._is_continued:
            return Tail([Text(self._thought, style="dim")], is_continued=False)
        self._spinner.update(text=Text(f"{time.monotonic() - self._started_s:.0f} s", style="dim"))
        return self._spinner

    def _print_thought(self, thought: str) -> None:
        if thought:
            self._thought = self._thought[len(thought) :]
            self._console.print(Text(thought.removesuffix("\n"), style="dim"))
            self._is_continued = True

    def _print_blocks(self, blocks: Sequence[RenderableType]) -> None:
        for block in blocks:
            if self._is_continued:
                self._console.print()
            self._console.print(block)
            self._is_continued = True


def _make_console(stream: IO[str], *, soft_wrap: bool) -> Console:
    return Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)
