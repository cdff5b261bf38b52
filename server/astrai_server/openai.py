"""``/v1/chat/completions``: the OpenAI protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
from astrai_server.wire import InvalidRequestError, Issue, MalformedBodyError, describe_value, parse_json

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine

UsageFrame = Literal["compat", "openai", "seed"]

ROLES = ("system", "developer", "user", "assistant", "tool")

# Stands for the text in the prebuilt chunk; only the server's own fields surround it there.
_TEXT_MARKER = "\x00text\x00"
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


@attrs.frozen(kw_only=True)
class ContentPart:
    """One part of a message."""

    type: str = attrs.field()
    text: str | None = None

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"cache_control", "annotations"})

    @type.validator
    def _check_type(self, _: object, value: str) -> None:
        if value != "text":
            refuse_unsupported(
                "type", f"content part {describe_value(value)} is not supported; supported: text"
            )

    def __attrs_post_init__(self) -> None:
        if self.text is None:
            refuse("text", "is required")


@attrs.frozen(kw_only=True)
class FunctionCall:
    """A function the assistant called, and the JSON text of its arguments."""

    name: str
    arguments: str = "{}"


@attrs.frozen(kw_only=True)
class ToolCall:
    """One call in an assistant's message."""

    function: FunctionCall
    type: str = attrs.field(default="function", validator=one_of("function"))

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"id", "index"})

    def render(self) -> str:
        """The call as models of the Hermes and Qwen families write it."""
        try:
            parse_json(self.function.arguments.encode())
            arguments = self.function.arguments
        except (MalformedBodyError, InvalidRequestError):
            arguments = json.dumps(self.function.arguments, ensure_ascii=False)
        name = json.dumps(self.function.name, ensure_ascii=False)
        return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


@attrs.frozen(kw_only=True)
class ChatMessage:
    """One message of the conversation."""

    role: str = attrs.field(validator=one_of(*ROLES))
    content: str | tuple[ContentPart, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    function_call: Any = attrs.field(default=None, validator=not_yet())
    audio: Any = attrs.field(default=None, validator=not_yet())

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"name", "tool_call_id", "refusal", "annotations", "reasoning_content", "reasoning"}
    )

    def __attrs_post_init__(self) -> None:
        if self.content is None and self.role != "assistant":
            refuse("content", f"wanted a string or a list for role {self.role}, got null")
        if self.tool_calls and self.role != "assistant":
            refuse("tool_calls", f"wanted none for role {self.role}, got {len(self.tool_calls)}")

    def render(self) -> dict[str, str]:
        """The message for the chat template: role and plain text."""
        if isinstance(self.content, tuple):
            text = "".join(part.text or "" for part in self.content)
        else:
            text = self.content or ""
        calls = "\n".join(call.render() for call in self.tool_calls)
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": "\n".join(piece for piece in (text, calls) if piece),
        }


@attrs.frozen(kw_only=True)
class StreamOptions:
    """Options of a stream."""

    include_usage: bool | None = None
    """None leaves the choice to the server."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


@attrs.frozen(kw_only=True)
class ChatCompletionRequest:
    """Body of ``POST /v1/chat/completions``."""

    messages: tuple[ChatMessage, ...] = attrs.field(validator=not_empty)
    model: str | None = attrs.field(default=None, validator=no_longer_than(base.MAX_MODEL_NAME))
    """Comes back in the response; None is the name of the served model."""
    temperature: float = attrs.field(default=1.0, validator=between(0, 2))
    top_p: float = attrs.field(default=1.0, validator=between(0, 1))
    top_k: int = attrs.field(default=50, validator=at_least(-1))
    min_p: float = attrs.field(default=0.0, validator=between(0, 1))
    max_tokens: int = attrs.field(default=2048, validator=at_least(0))
    max_completion_tokens: int | None = attrs.field(default=None, validator=at_least(0))
    """Wins over ``max_tokens``."""
    min_tokens: int = attrs.field(default=0, validator=at_least(0))
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | tuple[str, ...] | None = attrs.field(
        default=None, validator=stop_strings(base.MAX_STOPS, base.MAX_STOP_CHARS)
    )
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), validator=no_longer_than(base.MAX_STOP_IDS))
    ignore_eos: bool = False
    seed: int | None = attrs.field(default=None, validator=between(-(2**63), 2**63 - 1))
    presence_penalty: float = attrs.field(default=0.0, validator=between(-2, 2))
    frequency_penalty: float = attrs.field(default=0.0, validator=between(-2, 2))
    repetition_penalty: float = attrs.field(default=1.0, validator=between(0.01, 100))
    logit_bias: Mapping[str, float] = attrs.field(factory=dict)
    """Token id, as a string, -> added to its logit, -100 to 100."""
    n: int = attrs.field(default=1, validator=at_least(1))
    logprobs: bool = False
    top_logprobs: Any = attrs.field(default=None, validator=not_yet(0))
    tools: Any = attrs.field(default=None, validator=not_yet([]))
    tool_choice: Any = attrs.field(default=None, validator=not_yet("none", "auto"))
    functions: Any = attrs.field(default=None, validator=not_yet([]))
    function_call: Any = attrs.field(default=None, validator=not_yet("none", "auto"))
    response_format: Any = attrs.field(default=None, validator=not_yet({"type": "text"}))
    modalities: Any = attrs.field(default=None, validator=not_yet(["text"], []))
    audio: Any = attrs.field(default=None, validator=not_yet())
    prediction: Any = attrs.field(default=None, validator=not_yet())
    web_search_options: Any = attrs.field(default=None, validator=not_yet())

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {
            "cache_control",
            "metadata",
            "parallel_tool_calls",
            "prompt_cache_key",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        }
    )
    """Accepted, and changes nothing."""

    @logit_bias.validator
    def _check_bias(self, _: object, value: Mapping[str, float]) -> None:
        for key, bias in value.items():
            if not _TOKEN_ID.fullmatch(key):
                refuse("logit_bias", f"wanted a token id, got the key {describe_value(key)}", key)
            if not -100 <= bias <= 100:
                refuse("logit_bias", f"wanted -100 to 100, got {describe_value(bias)}", key)

    def __attrs_post_init__(self) -> None:
        if self.n != 1:
            refuse_unsupported("n", f"only one choice per request is supported, got {self.n}")
        if self.logprobs:
            refuse_unsupported("logprobs", "is not supported by this server; leave it out")

    @property
    def token_limit(self) -> int:
        """Tokens asked for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


@attrs.frozen(kw_only=True, eq=False)
class ChatContext(base.Context):
    """One chat completion."""

    usage_frame: Literal["official", "compat", "seed", "none"]
    """Form of the frame with the usage."""


class OpenAIResponseBuilder(base.ResponseBuilder[ChatCompletionRequest, ChatContext]):
    """Chat completions as OpenAI's clients read them.

    Args:
        usage_frame: how a stream reports its usage where the request does not say (``api.usage_frame``).
    """

    request_type = ChatCompletionRequest

    def __init__(self, usage_frame: UsageFrame = "compat") -> None:
        self._usage_frame = usage_frame

    def prepare(self, request: ChatCompletionRequest, engine: InferenceEngine) -> ChatContext:
        """See ``ResponseBuilder.prepare``."""
        base.check_token_ids("stop_token_ids", request.stop_token_ids, engine.vocab_size)
        for key in request.logit_bias:
            if int(key) >= engine.vocab_size:
                message = f"wanted token ids 0 to {engine.vocab_size - 1}"
                raise InvalidRequestError(Issue(("logit_bias", key), message))
        prompt_ids = base.encode_chat(engine, [message.render() for message in request.messages])
        max_tokens = base.limit_tokens(engine, len(prompt_ids), request.token_limit)
        context_id, created, model = base.new_id("chatcmpl-"), base.now(), request.model or engine.model_name
        usage_frame = self._choose_usage_frame(request.stream_options)
        fields = {"usage": None} if usage_frame == "official" else {}
        chunk = _make_chunk(context_id, created, model, {"content": _TEXT_MARKER}, **fields)
        head, tail = sse.split_frame(sse.format_data(chunk), _TEXT_MARKER)
        return ChatContext(
            id=context_id,
            created=created,
            model=model,
            prompt_ids=prompt_ids,
            params=_make_params(request, max_tokens, engine.vocab_size),
            is_stream=request.stream,
            chunk_head=head,
            chunk_tail=tail,
            usage_frame=usage_frame,
        )

    def _choose_usage_frame(
        self, options: StreamOptions | None
    ) -> Literal["official", "compat", "seed", "none"]:
        if options is not None and options.include_usage is not None:
            return "official" if options.include_usage else "none"
        return "none" if self._usage_frame == "openai" else self._usage_frame

    def format_stream_start(self, context: ChatContext, usage: base.Usage) -> bytes:
        """The frame with the role."""
        return self._format(context, {"role": "assistant", "content": ""})

    def format_chunk(self, context: ChatContext, text: str) -> bytes:
        """A frame with a piece of text."""
        return context.chunk_head + sse.encode_text(text) + context.chunk_tail

    def format_stream_end(self, context: ChatContext, outcome: base.Outcome) -> bytes:
        """The frame with the finish reason, the usage, the end."""
        finish = self._format(context, {}, finish_reason=outcome.finish_reason)
        return b"".join((finish, *self._format_usage(context, outcome.usage), sse.DONE))

    def format_stream_error(self, problem: Problem, request_id: str) -> bytes:
        """The error alone: no end marker follows."""
        return sse.format_data({"error": problem.as_error()})

    def format_response(self, context: ChatContext, outcome: base.Outcome) -> bytes:
        """A ``chat.completion`` object."""
        message = {"role": "assistant", "content": outcome.text}
        body = {
            "id": context.id,
            "object": "chat.completion",
            "created": context.created,
            "model": context.model,
            "choices": [{"index": 0, "message": message, "finish_reason": outcome.finish_reason}],
            "usage": _describe_usage(outcome.usage),
        }
        return sse.encode_json(body)

    def _format(
        self, context: ChatContext, delta: dict[str, str], *, finish_reason: str | None = None
    ) -> bytes:
        fields = {"usage": None} if context.usage_frame == "official" else {}
        chunk = _make_chunk(
            context.id, context.created, context.model, delta, finish_reason=finish_reason, **fields
        )
        return sse.format_data(chunk)

    def _format_usage(self, context: ChatContext, usage: base.Usage) -> Iterator[bytes]:
        described = _describe_usage(usage)
        if context.usage_frame == "seed":
            yield sse.format_data(_count_tokens(usage))
        elif context.usage_frame != "none":
            chunk = _make_chunk(context.id, context.created, context.model, {}, usage=described)
            if context.usage_frame == "official":
                chunk["choices"] = []
            else:
                chunk |= _count_tokens(usage)
            yield sse.format_data(chunk)


def _make_chunk(
    context_id: str,
    created: int,
    model: str,
    delta: dict[str, str],
    *,
    finish_reason: str | None = None,
    **fields: Any,
) -> dict[str, Any]:
    return {
        "id": context_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
        **fields,
    }


def _count_tokens(usage: base.Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _describe_usage(usage: base.Usage) -> dict[str, Any]:
    return _count_tokens(usage) | {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}


def _make_params(request: ChatCompletionRequest, max_tokens: int, vocab_size: int) -> Any:
    return base.make_params(
        max_tokens=max_tokens,
        min_tokens=min(request.min_tokens, max_tokens),
        temperature=request.temperature,
        # More than the vocabulary is all of it.
        top_k=min(request.top_k, vocab_size),
        top_p=request.top_p,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias={int(key): bias for key, bias in request.logit_bias.items()},
        seed=request.seed,
        stop=request.stop or (),
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
    )
