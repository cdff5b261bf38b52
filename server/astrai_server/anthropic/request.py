"""Bodies of Anthropic's requests."""

from __future__ import annotations

import re
from typing import Any, ClassVar, cast

import attrs

from astrai_server import builder as base
from astrai_server.anthropic.block import ContentBlock, join_texts, list_turns
from astrai_server.anthropic.tool import (
    MessagesTool,
    OutputConfig,
    OutputFormat,
    ToolChoice,
    distinct_tools,
)
from astrai_server.conversation import Role, Turn
from astrai_server.field import (
    at_least,
    between,
    no_longer_than,
    not_empty,
    not_yet,
    one_of,
    refuse,
    stop_strings,
)
from astrai_server.wire import InvalidRequestError, Issue

ROLES = ("user", "assistant", "system")

# Some agents put a line that differs with every request in front of their system prompt: kept, it would make
# every prompt a new one for the prefix cache.
_BILLING_LINE = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.IGNORECASE | re.MULTILINE)


# No conversation is kept here. The official client sends the whole one where it is told so.
_no_thread = not_yet(
    False,
    hint="leave it out, and send the whole conversation",
    details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
)


@attrs.frozen(kw_only=True)
class Message:
    """One message of the conversation."""

    role: str = attrs.field(validator=one_of(*ROLES))
    content: str | tuple[ContentBlock, ...]


@attrs.frozen(kw_only=True)
class PromptRequest:
    """Body of ``POST /v1/messages/count_tokens``."""

    messages: tuple[Message, ...] = attrs.field(validator=not_empty)
    model: str | None = attrs.field(default=None, validator=no_longer_than(base.MAX_MODEL_NAME))
    """Comes back in the response; None is the name of the served model."""
    system: str | tuple[ContentBlock, ...] | None = None
    tools: tuple[MessagesTool, ...] = attrs.field(default=(), validator=distinct_tools)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An earlier name of ``output_config.format``."""
    mcp_servers: Any = attrs.field(default=None, validator=not_yet([]))

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "context_management", "speed", "thinking", "user_profile_id", "workspace_id"}
    )

    def __attrs_post_init__(self) -> None:
        if self.output_format is not None and self.output_config is not None and self.output_config.format:
            refuse("output_format", "wanted either this or output_config.format, got both")

    @property
    def answer_format(self) -> OutputFormat | None:
        """The form of the answer, by whichever name it came."""
        config = self.output_config
        return config.format if config is not None and config.format is not None else self.output_format

    def list_turns(self) -> tuple[list[Turn], bool]:
        """The conversation, and whether the answer continues its last turn.

        Raises:
            InvalidRequestError: a block that its role cannot have, or calls that nobody answers.
        """
        turns: list[Turn] = []
        for i, message in enumerate(self.messages):
            try:
                turns += list_turns(cast(Role, message.role), message.content)
            except InvalidRequestError as error:
                issues = [attrs.evolve(issue, path=("messages", i, *issue.path)) for issue in error.issues]
                raise InvalidRequestError(*issues) from None
        system = _BILLING_LINE.sub("", join_texts(self.system)) if self.system else ""
        if system.strip():
            turns.insert(0, Turn(role="system", text=system))
        last = turns[-1]
        if last.role != "assistant":
            return turns, False
        if last.calls:
            cause = "wanted a tool_result for every tool_use before the next answer, got none"
            raise InvalidRequestError(Issue(("messages", len(self.messages) - 1), cause))
        # Without text there is nothing to continue: the last turn was empty, or only thoughts.
        return (turns, True) if last.text else (turns[:-1], False)


@attrs.frozen(kw_only=True)
class MessagesRequest(PromptRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: int = attrs.field(default=1024, validator=at_least(0))
    temperature: float = attrs.field(default=1.0, validator=between(0, 2))
    top_p: float = attrs.field(default=1.0, validator=between(0, 1))
    top_k: int = attrs.field(default=50, validator=at_least(-1))
    stream: bool = False
    stop_sequences: tuple[str, ...] = attrs.field(
        default=(), validator=stop_strings(base.MAX_STOPS, base.MAX_STOP_CHARS)
    )
    container: Any = attrs.field(default=None, validator=not_yet())
    compaction: Any = attrs.field(default=None, validator=not_yet())
    thread: Any = attrs.field(default=None, validator=_no_thread)

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = PromptRequest.WITHOUT_EFFECT | frozenset(
        {
            "billing_policy",
            "diagnostics",
            "fallback_credit_token",
            "fallbacks",
            "inference_geo",
            "metadata",
            "service_tier",
            "user",
        }
    )
    """Accepted, and changes nothing."""
