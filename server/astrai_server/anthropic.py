"""``/v1/messages``: the Anthropic protocol."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from astrai_server import builder as base
from astrai_server import sse
from astrai_server.field import (
    at_least,
    between,
    no_longer_than,
    not_empty,
    not_yet,
    one_of,
    refuse,
    refuse_unsupported,
    stop_strings,
)
from astrai_server.problem import Problem
from astrai_server.wire import describe_value

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine

ROLES = ("user", "assistant", "system")

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_THOUGHTS = ("thinking", "redacted_thinking")
_TEXT_MARKER = "\x00text\x00"

# Some agents put a line that differs with every request in front of their system prompt: kept, it would make
# every prompt a new one for the prefix cache.
_BILLING_LINE = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.IGNORECASE | re.MULTILINE)


@attrs.frozen(kw_only=True)
class ContentBlock:
    """One block of a message; thinking of earlier turns is accepted and dropped."""

    type: str = attrs.field(default="text")
    text: str | None = None

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "citations", "thinking", "signature", "data"}
    )

    @type.validator
    def _check_type(self, _: object, value: str) -> None:
        if value != "text" and value not in _THOUGHTS:
            refuse_unsupported(
                "type", f"content block {describe_value(value)} is not supported; supported: text"
            )

    def __attrs_post_init__(self) -> None:
        if self.type == "text" and self.text is None:
            refuse("text", "is required")


@attrs.frozen(kw_only=True)
class Message:
    """One message of the conversation."""

    role: str = attrs.field(validator=one_of(*ROLES))
    content: str | tuple[ContentBlock, ...]


@attrs.frozen(kw_only=True)
class MessagesRequest:
    """Body of ``POST /v1/messages``."""

    messages: tuple[Message, ...] = attrs.field(validator=not_empty)
    model: str | None = attrs.field(default=None, validator=no_longer_than(base.MAX_MODEL_NAME))
    """Comes back in the response; None is the name of the served model."""
    system: str | tuple[ContentBlock, ...] | None = None
    max_tokens: int = attrs.field(default=1024, validator=at_least(0))
    temperature: float = attrs.field(default=1.0, validator=between(0, 2))
    top_p: float = attrs.field(default=1.0, validator=between(0, 1))
    top_k: int = attrs.field(default=50, validator=at_least(-1))
    stream: bool = False
    stop_sequences: tuple[str, ...] = attrs.field(
        default=(), validator=stop_strings(base.MAX_STOPS, base.MAX_STOP_CHARS)
    )
    tools: Any = attrs.field(default=None, validator=not_yet([]))
    tool_choice: Any = attrs.field(default=None, validator=not_yet({"type": "none"}, {"type": "auto"}))
    thinking: Any = attrs.field(default=None, validator=not_yet({"type": "disabled"}))
    mcp_servers: Any = attrs.field(default=None, validator=not_yet([]))
    container: Any = attrs.field(default=None, validator=not_yet())
    context_management: Any = attrs.field(default=None, validator=not_yet({}))
    output_config: Any = attrs.field(default=None, validator=not_yet({}))
    output_format: Any = attrs.field(default=None, validator=not_yet())

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "metadata", "service_tier", "user"}
    )
    """Accepted, and changes nothing."""


class AnthropicResponseBuilder(base.ResponseBuilder[MessagesRequest, base.Context]):
    """Messages as Anthropic's clients read them."""

    request_type = MessagesRequest
    # message_start carries input_tokens and cache_read_input_tokens.
    awaits_prefill = True

    def prepare(self, request: MessagesRequest, engine: InferenceEngine) -> base.Context:
        """See ``ResponseBuilder.prepare``."""
        messages, continue_final = _render_conversation(request)
        prompt_ids = base.encode_chat(engine, messages, continue_final=continue_final)
        max_tokens = base.limit_tokens(engine, len(prompt_ids), request.max_tokens)
        head, tail = sse.split_frame(_format_delta(_TEXT_MARKER), _TEXT_MARKER)
        return base.Context(
            id=base.new_id("msg_"),
            created=base.now(),
            model=request.model or engine.model_name,
            prompt_ids=prompt_ids,
            params=base.make_params(
                max_tokens=max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                # More than the vocabulary is all of it.
                top_k=min(request.top_k, engine.vocab_size),
                stop=request.stop_sequences,
            ),
            is_stream=request.stream,
            chunk_head=head,
            chunk_tail=tail,
        )

    def format_stream_start(self, context: base.Context, usage: base.Usage) -> bytes:
        """``message_start`` with the tokens of the prompt, then ``content_block_start``."""
        message = _make_message(context, [], None, None, usage)
        block = {"type": "text", "text": ""}
        return sse.format_event("message_start", {"type": "message_start", "message": message}) + (
            sse.format_event(
                "content_block_start", {"type": "content_block_start", "index": 0, "content_block": block}
            )
        )

    def format_chunk(self, context: base.Context, text: str) -> bytes:
        """``content_block_delta``."""
        return context.chunk_head + sse.encode_text(text) + context.chunk_tail

    def format_stream_end(self, context: base.Context, outcome: base.Outcome) -> bytes:
        """``content_block_stop``, ``message_delta``, ``message_stop``, the end marker."""
        delta = {"stop_reason": _name_reason(outcome), "stop_sequence": outcome.stop_string}
        usage = _describe_usage(outcome.usage)
        return b"".join(
            (
                sse.format_event("content_block_stop", {"type": "content_block_stop", "index": 0}),
                sse.format_event("message_delta", {"type": "message_delta", "delta": delta, "usage": usage}),
                sse.format_event("message_stop", {"type": "message_stop"}),
                sse.DONE,
            )
        )

    def format_stream_error(self, problem: Problem, request_id: str) -> bytes:
        """``error``: no end marker follows."""
        body = {"type": "error", "error": problem.as_error(), "request_id": request_id}
        return sse.format_event("error", body)

    def format_response(self, context: base.Context, outcome: base.Outcome) -> bytes:
        """A ``message`` object."""
        content = [{"type": "text", "text": outcome.text}]
        reason = _name_reason(outcome)
        return sse.encode_json(_make_message(context, content, reason, outcome.stop_string, outcome.usage))


def _render_conversation(request: MessagesRequest) -> tuple[list[dict[str, str]], bool]:
    """Messages for the chat template, and whether the answer continues the last one."""
    rendered = [{"role": message.role, "content": _join(message.content)} for message in request.messages]
    system = _BILLING_LINE.sub("", _join(request.system)) if request.system else ""
    if system.strip():
        rendered.insert(0, {"role": "system", "content": system})
    if rendered[-1]["role"] != "assistant":
        return rendered, False
    if rendered[-1]["content"]:
        return rendered, True
    # Nothing to continue: the last turn was empty, or only thoughts.
    return rendered[:-1], False


def _join(content: str | tuple[ContentBlock, ...] | None) -> str:
    """The text of a message; blocks are paragraphs."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text or "" for block in content or () if block.type == "text")


def _name_reason(outcome: base.Outcome) -> str:
    return "stop_sequence" if outcome.stop_string is not None else _STOP_REASONS[outcome.finish_reason]


def _make_message(
    context: base.Context,
    content: list[dict[str, str]],
    stop_reason: str | None,
    stop_sequence: str | None,
    usage: base.Usage,
) -> dict[str, Any]:
    return {
        "id": context.id,
        "type": "message",
        "role": "assistant",
        "model": context.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": _describe_usage(usage),
    }


def _describe_usage(usage: base.Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _format_delta(text: str) -> bytes:
    delta = {"type": "text_delta", "text": text}
    return sse.format_event(
        "content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta}
    )
