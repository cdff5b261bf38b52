"""``astrai chat`` on a terminal: keys, signals, redrawing."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import pty
import re
import select
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from astrai_server.chat import screen
from astrai_server.chat.reply import Delta
from astrai_server.chat.screen import Screen
from astrai_triton.checkpoint.resolve import home as find_home
from chatting import CLEAN, DONE, END, Reply, frame, odd_server
from fake_engine import FakeEngine, serve_in_thread

TIMEOUT_S = 30
CTRL_C, CTRL_D, UP, ENTER = "\x03", "\x04", "\x1b[A", "\r"
PASTE = "\x1b[200~{}\x1b[201~"

# The terminal must be the controlling one, or Ctrl-C would be a character like any other.
START = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
RUN = "from astrai_server.cli import main; main(prog_name='astrai')\n"
HIDE_READLINE = "import sys; sys.modules['readline'] = None\n"


@attrs.define
class Terminal:
    """The other end of the terminal of a process."""

    fd: int
    process: subprocess.Popen[bytes]
    seen: str = ""
    """All that came."""
    _rest: str = ""
    """What came after the last text that was waited for, without escape sequences."""
    _cut: str = ""
    """The beginning of an escape sequence."""
    _decoder: codecs.IncrementalDecoder = attrs.field(factory=codecs.getincrementaldecoder("utf-8"))

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def read_until(self, text: str, *, timeout_s: float = TIMEOUT_S) -> str:
        """Everything up to ``text``, without escape sequences; ``TimeoutError`` if it does not come."""
        deadline = time.monotonic() + timeout_s
        while text not in self._rest:
            is_ready = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]
            data = self._read() if is_ready else b""
            if not data:
                raise TimeoutError(f"{text!r} did not come; came: {self._rest!r}")
            piece = self._decoder.decode(data)
            self.seen += piece
            plain, escape, cut = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r", "", self._cut + piece).partition("\x1b")
            self._rest, self._cut = self._rest + plain, escape + cut
        read, _, self._rest = self._rest.partition(text)
        return read

    def read_prompt(self) -> str:
        return self.read_until("\n> ")

    def clear_line(self) -> str:
        """Press Ctrl-C at the prompt and read up to the next."""
        self.type(CTRL_C)
        with contextlib.suppress(TimeoutError):
            return self.read_until("\n> ", timeout_s=1)
        # CPython looks at a signal that came between two keys only when something else comes.
        self.type(CTRL_C)
        return self.read_prompt()

    def ask(self, question: str) -> str:
        """Type a question and read up to the next prompt."""
        self.type(question + ENTER)
        self.read_until(question)
        return self.read_prompt()

    def leave(self) -> int:
        """Press Ctrl-D; the exit status."""
        self.type(CTRL_D)
        return self.process.wait(TIMEOUT_S)

    def _read(self) -> bytes:
        try:
            return os.read(self.fd, 65536)
        except OSError:
            # So Linux says that nobody has the other end open any more.
            return b""


@contextlib.contextmanager
def open_terminal(
    url: str, *args: str, before: str = "", term: str = "xterm", home: Path | None = None
) -> Iterator[Terminal]:
    """Run ``astrai chat`` in a terminal of 24 lines."""
    fd, other = pty.openpty()
    termios.tcsetwinsize(other, (24, 80))
    env = {key: value for key, value in os.environ.items() if key not in CLEAN}
    env |= {"TERM": term, "ASTRAI_HOME": str(home or "/nowhere")}
    process = subprocess.Popen(
        [sys.executable, "-c", START + before + RUN, "chat", "--url", url, *args],
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
        env=env,
    )
    try:
        yield Terminal(fd, process)
        # As it was found, unless it is still in use.
        assert process.poll() is None or termios.tcgetattr(other)[3] & termios.ECHO
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        os.close(fd)
        os.close(other)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Ctrl-C and Ctrl-D


def test_ctrl_c_stops_the_answer_and_keeps_what_came() -> None:
    engine = FakeEngine(("one ", "two ", "three ", "four"))
    engine.is_held = True
    with serve_in_thread(engine) as url, open_terminal(url) as terminal:
        terminal.read_prompt()
        terminal.type("count" + ENTER)
        terminal.read_until("three")
        terminal.type(CTRL_C)
        text = terminal.read_prompt()
        assert "one two three" in text
        assert "^C" not in text
        assert ", stopped]" in text
        assert "/retry asks again, /undo takes back what came of it" in text
        wait_for(lambda: engine.num_cancelled)
        engine.is_held = False
        assert "one two three four" in terminal.ask("go on")
        assert engine.prompts[-1] == "<user>count<assistant>one two three <user>go on<assistant>"
        assert terminal.leave() == 0
    assert terminal.seen.count("\x1b[?25h") == terminal.seen.count("\x1b[?25l")


def test_ctrl_c_before_the_answer_keeps_the_question_for_a_retry() -> None:
    engine = FakeEngine(("only",))
    engine.is_held = True
    with serve_in_thread(engine) as url, open_terminal(url) as terminal:
        terminal.read_prompt()
        terminal.type("count" + ENTER)
        terminal.read_until(" 0 s")
        wait_for(lambda: engine.prompts)
        terminal.type(CTRL_C)
        assert "/retry asks again\n" in terminal.read_prompt()
        wait_for(lambda: engine.num_cancelled)
        engine.is_held = False
        assert "only" in terminal.ask("/retry")
    assert engine.prompts == ["<user>count<assistant>"] * 2


def test_ctrl_c_at_the_prompt_clears_the_line_and_says_once_how_to_leave() -> None:
    engine = FakeEngine()
    with serve_in_thread(engine) as url, open_terminal(url) as terminal:
        terminal.read_prompt()
        terminal.type("half a li")
        assert "/exit or Ctrl-D leaves" in terminal.clear_line()
        terminal.type("first \\" + ENTER + "second")
        terminal.read_until("second")
        assert "leaves" not in terminal.clear_line()
        assert "Hello" in terminal.ask("whole")
        assert terminal.leave() == 0
    assert engine.prompts == ["<user>whole<assistant>"]


def test_ctrl_c_ends_a_single_question_with_status_1() -> None:
    engine = FakeEngine(("one ", "two ", "three"))
    engine.is_held = True
    with serve_in_thread(engine) as url, open_terminal(url, "count") as terminal:
        terminal.read_until("two")
        terminal.type(CTRL_C)
        text = terminal.read_until("stopped]")
        assert "one two" in text
        assert terminal.process.wait(TIMEOUT_S) == 1
        wait_for(lambda: engine.num_cancelled)


# Lines


def test_a_pasted_block_is_one_question() -> None:
    engine = FakeEngine()
    with serve_in_thread(engine) as url, open_terminal(url) as terminal:
        terminal.read_prompt()
        terminal.type(PASTE.format("def f():\n    return 1") + ENTER)
        terminal.read_until("Hello")
    assert engine.prompts == ["<user>def f():\n    return 1<assistant>"]


def test_a_pasted_block_is_one_question_without_readline_too() -> None:
    engine = FakeEngine()
    with serve_in_thread(engine) as url, open_terminal(url, before=HIDE_READLINE) as terminal:
        terminal.read_prompt()
        terminal.type("def f():\n    return 1\n")
        terminal.read_prompt()
    assert engine.prompts == ["<user>def f():\n    return 1<assistant>"]


def test_earlier_lines_come_back_and_commands_are_completed() -> None:
    engine = FakeEngine()
    with serve_in_thread(engine) as url, open_terminal(url) as terminal:
        terminal.read_prompt()
        terminal.ask("one")
        terminal.type(UP + " more" + ENTER)
        terminal.read_prompt()
        terminal.type("/sy\tbe brief" + ENTER)
        assert "set, for the next question" in terminal.read_prompt()
    assert [prompt.rpartition("<user>")[2] for prompt in engine.prompts] == [
        "one<assistant>",
        "one more<assistant>",
    ]


def test_keys_typed_during_an_answer_wait_for_the_next_prompt() -> None:
    engine = FakeEngine(("one ", "two ", "three"))
    engine.is_held = True
    with serve_in_thread(engine) as url, open_terminal(url) as terminal:
        terminal.read_prompt()
        terminal.type("count" + ENTER)
        terminal.read_until("two")
        terminal.type("early")
        engine.is_held = False
        assert "early" not in terminal.read_prompt()
        terminal.type(ENTER)
        terminal.read_prompt()
    assert engine.prompts[-1].endswith("<user>early<assistant>")


def test_lines_are_kept_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    engine = FakeEngine()
    with serve_in_thread(engine) as url:
        with open_terminal(url, home=home) as terminal:
            terminal.read_prompt()
            terminal.ask("secret")
            assert terminal.leave() == 0
        assert not home.exists()
        for keys in ("kept", UP + UP):
            with open_terminal(url, "--keep-history", home=home) as terminal:
                terminal.read_prompt()
                terminal.type(keys + ENTER)
                terminal.read_prompt()
                terminal.type("/exit" + ENTER)
                assert terminal.process.wait(TIMEOUT_S) == 0
    monkeypatch.setenv("ASTRAI_HOME", str(home))
    file = find_home() / "chat_history"
    assert file.read_text() == "kept\n/exit\nkept\n/exit\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert engine.prompts == ["<user>secret<assistant>"] + ["<user>kept<assistant>"] * 2


# Redrawing


def test_markdown_is_rendered_unless_the_terminal_cannot_or_nobody_wants_it() -> None:
    reply = Reply((frame("# Ti"), frame("tle\n\n**bo"), frame("ld**\n"), END, DONE))
    with odd_server(reply) as server:
        for args, term, raw in (((), "xterm", False), (("--plain",), "xterm", True), ((), "dumb", True)):
            with open_terminal(server.url, "hi", *args, term=term) as terminal:
                text = terminal.read_until("chunks out")
                assert ("# Title\n\n**bold**" in text) == raw
                assert "Title" in text
                assert ("\x1b[1mbold\x1b[0m" in terminal.seen) != raw
                assert terminal.process.wait(TIMEOUT_S) == 0


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def draw(monkeypatch: pytest.MonkeyPatch, *deltas: Delta, lines: int = 10) -> str:
    """What a terminal of 40 columns shows in the end, redrawn after every piece."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", str(lines))
    now_s = [0.0]
    monkeypatch.setattr(screen, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    stream = FakeTerminal()
    with Screen(stream, io.StringIO()).show_answer() as view:
        view.redraw()
        for delta in deltas:
            now_s[0] += 1
            view.add(delta)
            view.redraw()
    return replay(stream.getvalue(), lines)


def replay(output: str, num_lines: int) -> str:
    """The text that ``output`` leaves behind; fails if it moves the cursor up beyond the screen."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[^\x1b]+", output):
        if part == "\x1b[2K":
            lines[row] = ""
        elif part == "\x1b[1A":
            row -= 1
            assert row > len(lines) - 1 - num_lines
        elif not part.startswith("\x1b"):
            for char in part.replace("\r", ""):
                if char == "\n":
                    row += 1
                    lines += [""] * (row == len(lines))
                else:
                    lines[row] += char
    assert not any(lines[row + 1 :])
    return "\n".join(line.rstrip() for line in lines[: row + 1])


def test_a_block_taller_than_the_screen_is_whole_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    code = [f"line_{i}" for i in range(40)]
    pieces = ["Text.\n\n```\n", *(f"{line}\n" for line in code), "```\n", "- a\n- b"]
    text = draw(monkeypatch, *(Delta(text=piece) for piece in pieces))
    assert text.split() == ["Text.", *code, "•", "a", "•", "b"]


def test_reasoning_comes_before_the_answer_and_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = [Delta(reasoning=piece) for piece in ("Hm, ", "well\x1b[2J.\nI", " know.")]
    deltas += [Delta(text=piece) for piece in ("It", " is *so*.\n", "\nReally.")]
    assert draw(monkeypatch, *deltas) == "Hm, well.\nI know.\n\nIt is so.\n\nReally.\n"


def test_an_answer_that_never_comes_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert draw(monkeypatch, Delta(), Delta()).strip() == ""
