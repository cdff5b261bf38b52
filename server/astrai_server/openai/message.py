"""Messages of a conversation as OpenAI's clients send them."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import attrs

from astrai_server.conversation import Call, Role, Turn
from astrai_server.field import not_yet, one_of, refuse, refuse_unsupported
from astrai_server.wire import describe_value

ROLES = ("system", "developer", "user", "assistant", "tool")

_TEXT_PARTS = ("text", "refusal")


@attrs.frozen(kw_only=True)
class ContentPart:
    """One part of a message."""

    type: str = attrs.field()
    text: str | None = None
    refusal: str | None = None
    """The text of a part of type ``refusal``."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "cache_control", "prompt_cache_breakpoint"}
    )

    @type.validator
    def _check_type(self, _: object, value: str) -> None:
        if value not in _TEXT_PARTS:
            supported = ", ".join(_TEXT_PARTS)
            message = f"content part {describe_value(value)} is not supported; supported: {supported}"
            refuse_unsupported("type", message)

    def __attrs_post_init__(self) -> None:
        if getattr(self, self.type) is None:
            refuse(self.type, "is required")

    @property
    def content(self) -> str:
        """Its text, whatever its type."""
        return (self.text if self.type == "text" else self.refusal) or ""


@attrs.frozen(kw_only=True)
class FunctionCall:
    """A function the assistant called, and the JSON text of its arguments."""

    name: str
    arguments: str = "{}"


@attrs.frozen(kw_only=True)
class ToolCall:
    """One call in an assistant's message."""

    function: FunctionCall
    id: str | None = None
    type: str = attrs.field(default="function", validator=one_of("function"))

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"index"})


@attrs.frozen(kw_only=True)
class ChatMessage:
    """One message of the conversation."""

    role: str = attrs.field(validator=one_of(*ROLES))
    content: str | tuple[ContentPart, ...] | None = None
    refusal: str | None = None
    """What an assistant said instead of ``content``."""
    name: str | None = None
    """Where role is tool, the function that was called."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Where role is tool, the call that this answers."""
    function_call: Any = attrs.field(default=None, validator=not_yet())
    audio: Any = attrs.field(default=None, validator=not_yet())

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"annotations", "reasoning_content", "reasoning"})

    def __attrs_post_init__(self) -> None:
        if self.content is None and self.role != "assistant":
            refuse("content", f"wanted a string or a list for role {self.role}, got null")
        if self.tool_calls and self.role != "assistant":
            refuse("tool_calls", f"wanted none for role {self.role}, got {len(self.tool_calls)}")

    def as_turn(self) -> Turn:
        """The message in the words of both protocols."""
        if isinstance(self.content, tuple):
            text = "".join(part.content for part in self.content)
        else:
            text = self.content or self.refusal or ""
        return Turn(
            role=cast(Role, "system" if self.role == "developer" else self.role),
            text=text,
            calls=tuple(
                Call(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in self.tool_calls
            ),
            call_id=self.tool_call_id,
            name=self.name,
        )
