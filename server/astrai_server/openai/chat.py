"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from astrai_server import builder as base
from astrai_server import sse
from astrai_server.answer import CallArguments, CallStart, Piece, Text
from astrai_server.conversation import encode_conversation
from astrai_server.openai.frame import (
    OpenAIContext,
    UsageForm,
    UsageFrame,
    choose_usage_form,
    describe_logprobs,
    describe_usage,
    format_usage,
    mark_usage,
    speller_of,
)
from astrai_server.openai.request import ChatCompletionRequest
from astrai_server.openai.tool import ResponseFormat, choose_tools
from astrai_server.problem import Problem
from astrai_server.tools.plan import ToolFormat, plan_tools
from astrai_triton.grammar import Grammar

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine
    from astrai_triton.engine.result import TokenLogprob

# Stands for the text in the prebuilt chunk; only the server's own fields surround it there.
_TEXT_MARKER = "\x00text\x00"


class OpenAIResponseBuilder(base.ResponseBuilder[ChatCompletionRequest, OpenAIContext]):
    """Chat completions as OpenAI's clients read them.

    Args:
        usage_frame: how a stream reports its usage where the request does not say (``api.usage_frame``).
        tool_format: how the model writes calls of tools (``api.tool_format``).
    """

    request_type = ChatCompletionRequest

    def __init__(self, usage_frame: UsageFrame = "compat", tool_format: ToolFormat = "auto") -> None:
        self._usage_frame = usage_frame
        self._tool_format = tool_format

    def prepare(self, request: ChatCompletionRequest, engine: InferenceEngine) -> OpenAIContext:
        """See ``ResponseBuilder.prepare``."""
        choice = choose_tools(request.tools, request.tool_choice, is_parallel=request.parallel_tool_calls)
        tools = [tool.as_tool() for tool in request.tools]
        answer = _make_grammar(request.response_format)
        base.check_grammar(engine, answer, "response_format", "json_schema", "schema")
        plan = plan_tools(tools, choice, self._tool_format, engine, id_prefix="call_", answer=answer)
        turns = [message.as_turn() for message in request.messages]
        prompt_ids = encode_conversation(engine, turns, tools=tools, choice=choice)
        max_tokens = base.limit_tokens(engine, len(prompt_ids), request.token_limit)
        params = request.make_params(
            max_tokens,
            engine.vocab_size,
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            grammar=plan.grammar,
        )
        answer_id, created = base.new_id("chatcmpl-"), base.now()
        model = request.model or engine.model_name
        usage_form = choose_usage_form(self._usage_frame, request.stream_options)
        head = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model}
        return OpenAIContext(
            id=answer_id,
            created=created,
            model=model,
            prompts=(prompt_ids,),
            num_choices=request.n,
            params=params,
            is_stream=request.stream,
            text_frames=tuple(
                sse.split_frame(
                    sse.format_data(_make_chunk(head, usage_form, index, {"content": _TEXT_MARKER})),
                    _TEXT_MARKER,
                )
                for index in range(request.n)
                if request.stream
            ),
            make_parser=plan.make_parser,
            head=head,
            usage_form=usage_form,
            has_logprobs=request.logprobs,
            tokenizer=speller_of(engine),
        )

    def format_stream_start(self, context: OpenAIContext, usage: base.Usage) -> bytes:
        """A frame with the role for each choice."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(_format_chunk(context, index, delta) for index in range(context.num_choices))

    def format_piece(self, context: OpenAIContext, index: int, piece: Piece) -> bytes:
        """A frame with text, the beginning of a call or a part of its arguments."""
        if isinstance(piece, Text):
            if not context.has_logprobs:
                return self.format_chunk(context, piece.text, index)
            logprobs = _describe_logprobs(context, piece.logprobs)
            return _format_chunk(context, index, {"content": piece.text}, logprobs=logprobs)
        if isinstance(piece, CallStart):
            call = {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
        elif isinstance(piece, CallArguments):
            call = {"function": {"arguments": piece.text}}
        else:
            return b""
        return _format_chunk(context, index, {"tool_calls": [{"index": piece.index} | call]})

    def format_choice_end(self, context: OpenAIContext, choice: base.Choice) -> bytes:
        """The frame with the finish reason."""
        return _format_chunk(context, choice.index, {}, finish_reason=choice.finish_reason)

    def format_stream_end(
        self, context: OpenAIContext, choices: Sequence[base.Choice], usage: base.Usage
    ) -> bytes:
        """The usage, the end."""
        chunk = _make_chunk(context.head, "none", 0, {})
        return format_usage(context, usage, chunk) + sse.DONE

    def format_stream_error(self, problem: Problem, request_id: str) -> bytes:
        """The error alone: no end marker follows."""
        return sse.format_data({"error": problem.as_error()})

    def format_response(
        self, context: OpenAIContext, choices: Sequence[base.Choice], usage: base.Usage
    ) -> bytes:
        """A ``chat.completion`` object."""
        described = [_describe_choice(context, choice) for choice in choices]
        body = {**context.head, "object": "chat.completion", "choices": described}
        return sse.encode_json(body | {"usage": describe_usage(usage)})


def _make_grammar(response_format: ResponseFormat | None) -> Grammar | None:
    """What the form of the answer asks for."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None or response_format.type == "json_object":
        return Grammar.json_object()
    return Grammar.json_schema(response_format.json_schema.schema)


def _make_chunk(
    head: Mapping[str, Any],
    usage_form: UsageForm,
    index: int,
    delta: Mapping[str, Any],
    *,
    finish_reason: str | None = None,
    **fields: Any,
) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish_reason, **fields}
    return mark_usage({**head, "choices": [choice]}, usage_form)


def _format_chunk(context: OpenAIContext, index: int, delta: Mapping[str, Any], **fields: Any) -> bytes:
    return sse.format_data(_make_chunk(context.head, context.usage_form, index, delta, **fields))


def _describe_choice(context: OpenAIContext, choice: base.Choice) -> dict[str, Any]:
    calls = _describe_calls(choice.pieces)
    # What called a tool and said nothing has no content; an empty answer is a text all the same.
    message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    described = {"index": choice.index, "message": message, "finish_reason": choice.finish_reason}
    if context.has_logprobs:
        described["logprobs"] = _describe_logprobs(context, choice.logprobs)
    return described


def _describe_calls(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """The calls of a whole answer."""
    arguments = {piece.index: piece.text for piece in pieces if isinstance(piece, CallArguments)}
    return [
        {
            "id": piece.id,
            "type": "function",
            "function": {"name": piece.name, "arguments": arguments[piece.index]},
        }
        for piece in pieces
        if isinstance(piece, CallStart)
    ]


def _describe_logprobs(context: OpenAIContext, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": describe_logprobs(context.tokenizer, entries), "refusal": None}
