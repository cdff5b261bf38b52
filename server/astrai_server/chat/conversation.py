"""What was said, what of it the server is told, and what of it can be taken back."""

from __future__ import annotations

import json
import re
from typing import Any

import attrs

from astrai_server.chat.answer import Answer
from astrai_server.chat.control import repair_surrogates

_C1 = re.compile("[\x7f-\x9f]")


@attrs.define
class Conversation:
    """Questions with their answers, oldest first; stopped and broken answers are among them."""

    system: str | None = None
    """System prompt; None leaves it to the server."""
    turns: list[Answer] = attrs.field(factory=list)
    unanswered: str | None = None
    """The last question, if nothing came back."""

    @property
    def last_question(self) -> str | None:
        """What ``/retry`` asks and ``/undo`` takes back."""
        if self.unanswered is not None:
            return self.unanswered
        return self.turns[-1].question if self.turns else None

    def list_messages(self, question: str, *, is_retry: bool = False) -> list[dict[str, str]]:
        """Messages of the request that asks ``question``.

        Args:
            question: the last message.
            is_retry: it is ``last_question``, whose answer, if it has one, is to be replaced.
        """
        return [*self._list_said(self._keep(is_retry)), {"role": "user", "content": question}]

    def record(self, answer: Answer, *, is_retry: bool = False) -> None:
        """Remember an answer. One without text replaces nothing; its question is then the unanswered one."""
        if answer.text:
            self.turns = [*self._keep(is_retry), answer]
            self.unanswered = None
        elif not is_retry:
            self.unanswered = answer.question

    def undo(self) -> str | None:
        """Take back ``last_question`` and its answer; None if there is none."""
        question = self.last_question
        self.turns = self._keep(is_retry=True)
        self.unanswered = None
        return question

    def reset(self) -> None:
        """Forget all that was said; the system prompt stays."""
        self.turns.clear()
        self.unanswered = None

    def to_json(self, **fields: Any) -> str:
        """A JSON document with ``fields`` and the messages; each answer says how it ended."""
        said: list[dict[str, Any]] = []
        answers = iter(self.turns)
        for message in self._list_said(self.turns):
            said.append(dict(message))
            if message["role"] == "assistant":
                answer = next(answers)
                said[-1]["finish_reason"] = answer.finish_reason
                if answer.reasoning:
                    said[-1]["reasoning_content"] = answer.reasoning
        text = repair_surrogates(json.dumps({**fields, "messages": said}, ensure_ascii=False, indent=2))
        # JSON escapes the other controls itself; a file that is shown on a terminal must not steer it.
        return _C1.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"

    def _keep(self, is_retry: bool) -> list[Answer]:
        """Turns without the one that a retry replaces."""
        return self.turns[:-1] if is_retry and self.unanswered is None else self.turns[:]

    def _list_said(self, turns: list[Answer]) -> list[dict[str, str]]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.text})
        return messages
