"""Question after question until the user has had enough."""

from __future__ import annotations

from collections.abc import Callable

from astrai_server.chat.command import MARK, CommandSet
from astrai_server.chat.prompt import read_question
from astrai_server.chat.session import ChatSession


def chat(session: ChatSession, commands: CommandSet, read_line: Callable[[str], str]) -> None:
    """Read lines and answer them until ``/exit`` or the end of the input. No failure of the server ends it.

    Args:
        session: answers.
        commands: carries out lines that begin with a slash.
        read_line: takes the prompt; raises ``EOFError`` and ``KeyboardInterrupt`` as ``input`` does.
    """
    has_hinted = False
    while not commands.is_over:
        try:
            _take(read_question(read_line), session, commands)
        except EOFError:
            session.screen.note("")
            return
        except KeyboardInterrupt:
            session.screen.note("" if has_hinted else "\n/exit or Ctrl-D leaves")
            has_hinted = True


def _take(line: str, session: ChatSession, commands: CommandSet) -> None:
    if not line.strip():
        return
    if line.startswith(MARK) and not line.startswith(MARK * 2):
        commands.run(line)
    else:
        session.ask(line.removeprefix(MARK) if line.startswith(MARK) else line)
    session.screen.note("")
