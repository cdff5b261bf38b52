"""The lines that are not for the model: ``/help`` and its like."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from pathlib import Path

import attrs

from astrai_server.chat.control import make_line
from astrai_server.chat.errors import ChatError
from astrai_server.chat.parameter import check_name, parse_value, suggest
from astrai_server.chat.session import ChatSession

MARK = "/"
"""Begins a command; two of them begin a question with one."""

_QUOTE_CHARS = 60


@attrs.frozen
class _Command:
    usage: str
    help: str
    run: Callable[[str], None]


class CommandSet:
    """Carries out commands on a session.

    Args:
        session: what they change.
    """

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        self._saved: set[Path] = set()
        """Files of this session, which may be written again."""
        self.is_over = False
        """Whether the user has had enough."""
        self._commands = {
            "/retry": _Command("", "ask the last question again, and replace its answer", self._retry),
            "/undo": _Command("", "take back the last question and its answer", self._undo),
            "/reset": _Command("", "forget the conversation; system prompt and parameters stay", self._reset),
            "/system": _Command("[TEXT]", "set the system prompt, or show it", self._system),
            "/set": _Command(
                "[NAME VALUE]", "set a parameter (/set temperature 0.2), or show all", self._set
            ),
            "/unset": _Command("NAME", "leave a parameter, or system, to the server again", self._unset),
            "/model": _Command("[NAME]", "choose the model, or list those there are", self._model),
            "/save": _Command("FILE", "write the conversation as JSON", self._save),
            "/help": _Command("", "show this", self._help),
            "/exit": _Command("", "leave; Ctrl-D does, too", self._exit),
        }

    @property
    def names(self) -> list[str]:
        """The commands, each with its mark."""
        return list(self._commands)

    def run(self, line: str) -> None:
        """Carry out ``line``, which begins with ``MARK``; failures are shown."""
        name, *rest = line.split(None, 1)
        command = self._commands.get("/exit" if name == "/quit" else name)
        if command is None:
            close = difflib.get_close_matches(name, self._commands, n=1)
            hint = f"did you mean {close[0]}?" if close else "/help shows those there are"
            self._session.screen.fail(
                f"unknown command {make_line(name, 40)}; {hint} (// begins a question with a slash)"
            )
            return
        argument = rest[0].strip() if rest else ""
        try:
            if argument and not command.usage:
                raise ValueError(f"{name} takes nothing after it, got {make_line(argument, 40)!r}")
            command.run(argument)
        except (ChatError, ValueError) as error:
            self._session.screen.fail(str(error))
        except OSError as error:
            self._session.screen.fail(f"{argument}: {error.strerror or error}")

    def _retry(self, _: str) -> None:
        question = self._session.conversation.last_question
        if question is None:
            raise ValueError("there is no question to ask again")
        self._session.ask(question, is_retry=True)

    def _undo(self, _: str) -> None:
        conversation = self._session.conversation
        question = conversation.undo()
        if question is None:
            raise ValueError("there is nothing to take back")
        num = len(conversation.turns)
        left = f"{num} answer{'' if num == 1 else 's'} left" if num else "nothing is left"
        self._session.screen.say(f"took back {make_line(question, _QUOTE_CHARS)!r}; {left}")

    def _reset(self, _: str) -> None:
        self._session.conversation.reset()
        self._session.screen.say("a new conversation")

    def _system(self, text: str) -> None:
        conversation = self._session.conversation
        if text:
            conversation.system = text
            self._session.screen.say("set, for the next question and those after it")
        else:
            self._session.screen.say(
                "no system prompt" if conversation.system is None else conversation.system
            )

    def _set(self, argument: str) -> None:
        parameters = self._session.parameters
        if not argument:
            lines = [f"{name} = {json.dumps(value)}" for name, value in parameters.items()]
            self._session.screen.say("\n".join(lines) or "nothing is set: the server's defaults hold")
            return
        name, *rest = argument.replace("=", " ", 1).split(None, 1)
        check_name(name)
        if not rest:
            raise ValueError(f"wanted /set {name} VALUE; /unset {name} leaves it to the server")
        parameters[name] = parse_value(rest[0])
        close = suggest(name)
        self._session.screen.say(
            f"{name} = {json.dumps(parameters[name])}"
            + (f" (did you mean {close}? /unset {name} takes it back)" if close else "")
        )

    def _unset(self, name: str) -> None:
        if name == "system":
            self._session.conversation.system = None
        elif name in self._session.parameters:
            del self._session.parameters[name]
        else:
            known = ", ".join(["system", *self._session.parameters])
            raise ValueError(f"wanted one of {known}, got {make_line(name, 40)!r}")
        self._session.screen.say(f"{name} is left to the server")

    def _model(self, name: str) -> None:
        session = self._session
        if name:
            session.model = name
            session.screen.say(f"{name} answers from now on")
            return
        for listed in session.list_models():
            session.screen.say(f"{'*' if listed == session.model else ' '} {make_line(listed)}")

    def _save(self, argument: str) -> None:
        if not argument:
            raise ValueError("wanted /save FILE")
        path = Path(argument).expanduser().resolve()
        text = self._session.conversation.to_json(
            model=self._session.model, parameters=self._session.parameters
        )
        try:
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError as error:
            raise ValueError(f"{path} exists already; choose another name") from error
        self._saved.add(path)
        self._session.screen.say(f"saved as {path}")

    def _help(self, _: str) -> None:
        lines = [
            f"{f'{name} {command.usage}':<19} {command.help}" for name, command in self._commands.items()
        ]
        lines += [
            "",
            "A line that ends with \\ goes on in the next one; // begins a question with a slash.",
            "Ctrl-C stops an answer, and keeps what came of it; at the prompt it clears the line.",
        ]
        self._session.screen.say("\n".join(lines))

    def _exit(self, _: str) -> None:
        self.is_over = True
