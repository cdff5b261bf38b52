"""Questions from the keyboard, with line editing where there is any, or from a pipe."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO

MAX_KEPT_LINES = 1000

_FIRST, _MORE = "> ", "| "
_GREEN, _PLAIN = "\x1b[1;32m", "\x1b[0m"


def read_question(read_line: Callable[[str], str]) -> str:
    """Read lines until one does not end with a backslash, and join them.

    Args:
        read_line: takes the prompt; raises ``EOFError`` and ``KeyboardInterrupt`` as ``input`` does.
    """
    lines: list[str] = []
    while True:
        try:
            line = read_line(_MORE if lines else _FIRST)
        except EOFError:
            if not lines:
                raise
            return "\n".join(lines)
        # Two of them are a line break of LaTeX's.
        is_continued = (len(line) - len(line.rstrip("\\"))) % 2 == 1
        lines.append(line[:-1] if is_continued else line)
        if not is_continued:
            return "\n".join(lines)


class PipeReader:
    """Lines of a file or a pipe; prompts are not shown.

    Args:
        stream: bytes, UTF-8.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def __call__(self, prompt: str) -> str:
        """The next line; raises ``EOFError`` after the last, or if the user wants no more of them."""
        try:
            line = self._stream.readline()
        except KeyboardInterrupt as error:
            raise EOFError from error
        if not line:
            raise EOFError
        return line.decode("utf-8", "replace").rstrip("\r\n")


class KeyboardReader:
    """Lines of the terminal; a context manager, which keeps the history if there is a file for it.

    A block of lines that is pasted comes as one line with line feeds in it.

    Args:
        words: completed by the Tab key where a line begins.
        history: file that the lines are kept in; None keeps them in memory alone.
        has_color: whether the prompt may be coloured.
    """

    def __init__(self, words: Sequence[str], *, history: Path | None = None, has_color: bool = True) -> None:
        self._words = words
        self._history = history
        self._has_color = has_color
        self._readline = _find_readline()
        self._knows_pastes = False

    def __enter__(self) -> KeyboardReader:
        readline = self._readline
        if readline is None:
            return self
        self._knows_pastes = "libedit" not in (readline.__doc__ or "")
        if self._knows_pastes:
            readline.parse_and_bind("set enable-bracketed-paste on")
            readline.parse_and_bind("tab: complete")
        else:
            readline.parse_and_bind("bind ^I rl_complete")
        readline.set_completer_delims(" \t\n")
        readline.set_completer(self._complete)
        if self._history is not None:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            # Nobody else's business, from the start.
            os.close(os.open(self._history, os.O_CREAT | os.O_RDONLY, 0o600))
            readline.read_history_file(self._history)
            readline.set_history_length(MAX_KEPT_LINES)
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is not None and self._history is not None:
            self._readline.write_history_file(self._history)

    def __call__(self, prompt: str) -> str:
        """Read a line as ``input`` does."""
        lines = [input(self._decorate(prompt))]
        while not self._knows_pastes and _has_input():
            lines.append(input())
        return "\n".join(lines)

    def _decorate(self, prompt: str) -> str:
        if not self._has_color:
            return prompt
        if self._readline is None:
            return f"{_GREEN}{prompt}{_PLAIN}"
        # \x01 and \x02 tell readline what takes no room.
        return f"\x01{_GREEN}\x02{prompt}\x01{_PLAIN}\x02"

    def _complete(self, text: str, state: int) -> str | None:
        assert self._readline is not None
        is_first = self._readline.get_begidx() == 0 and text
        found = [f"{word} " for word in self._words if word.startswith(text)] if is_first else []
        return found[state] if state < len(found) else None


@contextlib.contextmanager
def hide_typing() -> Iterator[None]:
    """Keep keys from being echoed into an answer; they wait for the next prompt. Ctrl-C still works."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _find_readline() -> ModuleType | None:
    """Some builds of Python have none."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def _has_input() -> bool:
    """Whether another line is there already: nobody types that fast."""
    return bool(select.select([sys.stdin], [], [], 0)[0])
