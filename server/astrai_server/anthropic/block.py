"""Blocks of messages as Anthropic's clients send them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import attrs

from astrai_server.conversation import Call, Role, Turn
from astrai_server.field import one_of, refuse
from astrai_server.wire import describe_value

THOUGHTS = ("thinking", "redacted_thinking")

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


@attrs.frozen(kw_only=True)
class ResultBlock:
    """One block of what a tool gave."""

    type: str = attrs.field(default="text", validator=one_of("text"))
    text: str

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations"})


@attrs.frozen(kw_only=True)
class ContentBlock:
    """One block of a message; thinking of earlier turns is accepted and dropped."""

    type: str = attrs.field(default="text", validator=one_of("text", "tool_use", "tool_result", *THOUGHTS))
    text: str | None = None
    id: str | None = None
    """Of a ``tool_use``."""
    name: str | None = None
    """Of a ``tool_use``: the tool."""
    input: Mapping[str, Any] | None = None
    """Of a ``tool_use``: the arguments."""
    tool_use_id: str | None = None
    """Of a ``tool_result``: the ``tool_use`` that it answers."""
    content: str | tuple[ResultBlock, ...] | None = None
    """Of a ``tool_result``."""
    is_error: bool = False
    """Of a ``tool_result``: the tool failed, and ``content`` says how."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "caller", "citations", "data", "signature", "thinking", "toolset_name"}
    )

    def __attrs_post_init__(self) -> None:
        for name in _REQUIRED.get(self.type, ()):
            if getattr(self, name) is None:
                refuse(name, "is required")

    def as_call(self) -> Call:
        """A ``tool_use`` in the words of both protocols."""
        # As models write it: characters are not escaped.
        arguments = json.dumps(self.input or {}, ensure_ascii=False)
        return Call(id=self.id, name=self.name or "", arguments=arguments)

    def as_turn(self) -> Turn:
        """A ``tool_result`` in the words of both protocols."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(block.text for block in content)
        return Turn(role="tool", text=f"Error: {text}" if self.is_error else text, call_id=self.tool_use_id)


def list_turns(role: Role, content: str | Iterable[ContentBlock]) -> list[Turn]:
    """A message in the words of both protocols: results of tools are turns of their own.

    Raises:
        InvalidRequestError: a block that ``role`` cannot have.
    """
    if isinstance(content, str):
        return [Turn(role=role, text=content)]
    blocks = tuple(content)
    wrong = {"user": "tool_use", "assistant": "tool_result"}.get(role)
    for i, block in enumerate(blocks):
        if block.type == wrong or (role == "system" and block.type != "text"):
            refuse("content", f"wanted no {block.type} for role {describe_value(role)}", i, "type")
    if role != "user":
        calls = tuple(block.as_call() for block in blocks if block.type == "tool_use")
        return [Turn(role=role, text=join_texts(blocks), calls=calls)]
    turns: list[Turn] = []
    texts: list[ContentBlock] = []
    for block in blocks:
        if block.type == "tool_result":
            turns += _close_user_turn(texts)
            turns.append(block.as_turn())
        else:
            texts.append(block)
    turns += _close_user_turn(texts)
    return turns or [Turn(role="user", text="")]


def _close_user_turn(texts: list[ContentBlock]) -> list[Turn]:
    turns = [Turn(role="user", text=join_texts(texts))] if texts else []
    texts.clear()
    return turns


def join_texts(content: str | Iterable[ContentBlock] | None) -> str:
    """The text of a message; blocks are paragraphs."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text or "" for block in content or () if block.type == "text")
