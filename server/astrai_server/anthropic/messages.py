"""``/v1/messages``: how requests become prompts, and answers become blocks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from astrai_server import builder as base
from astrai_server import sse
from astrai_server.answer import CallArguments, CallStart, Piece, Text
from astrai_server.anthropic.request import MessagesRequest, PromptRequest
from astrai_server.anthropic.tool import choose_tools
from astrai_server.conversation import encode_conversation
from astrai_server.problem import Problem
from astrai_server.tools.plan import ToolFormat, plan_tools
from astrai_triton.grammar import Grammar

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TEXT_MARKER = "\x00text\x00"
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")

BlockKind = Literal["text", "tool_use"]


@attrs.define
class OpenBlock:
    """The block that a stream is writing."""

    index: int = -1
    kind: BlockKind | None = None
    """None: none is open."""


@attrs.frozen(kw_only=True, eq=False)
class MessagesContext(base.Context):
    """One message."""

    block: OpenBlock = attrs.field(factory=OpenBlock)


def encode_prompt(request: PromptRequest, engine: InferenceEngine) -> list[int]:
    """Token ids of a request's prompt.

    Raises:
        InvalidRequestError, ChatTemplateError: it cannot be rendered.
    """
    turns, continue_final = request.list_turns()
    return encode_conversation(
        engine,
        turns,
        tools=[tool.as_tool() for tool in request.tools],
        choice=choose_tools(request.tools, request.tool_choice),
        continue_final=continue_final,
    )


async def count_tokens(request: PromptRequest, engine: InferenceEngine) -> dict[str, int]:
    """Answer ``POST /v1/messages/count_tokens``."""
    return {"input_tokens": len(await asyncio.to_thread(encode_prompt, request, engine))}


class AnthropicResponseBuilder(base.ResponseBuilder[MessagesRequest, MessagesContext]):
    """Messages as Anthropic's clients read them."""

    request_type = MessagesRequest
    # message_start carries input_tokens and cache_read_input_tokens.
    awaits_prefill = True

    def __init__(self, tool_format: ToolFormat = "auto") -> None:
        self._tool_format = tool_format

    def prepare(self, request: MessagesRequest, engine: InferenceEngine) -> MessagesContext:
        """See ``ResponseBuilder.prepare``."""
        tools = [tool.as_tool() for tool in request.tools]
        choice = choose_tools(request.tools, request.tool_choice)
        answer_format = request.answer_format
        answer = Grammar.json_schema(answer_format.schema) if answer_format is not None else None
        path = ("output_format",) if request.output_format is not None else ("output_config", "format")
        base.check_grammar(engine, answer, *path, "schema")
        plan = plan_tools(tools, choice, self._tool_format, engine, id_prefix="toolu_", answer=answer)
        prompt_ids = encode_prompt(request, engine)
        head, tail = sse.split_frame(
            _format_delta(0, {"type": "text_delta", "text": _TEXT_MARKER}), _TEXT_MARKER
        )
        return MessagesContext(
            id=base.new_id("msg_"),
            created=base.now(),
            model=request.model or engine.model_name,
            prompts=(prompt_ids,),
            params=base.make_params(
                max_tokens=base.limit_tokens(engine, len(prompt_ids), request.max_tokens),
                temperature=request.temperature,
                top_p=request.top_p,
                # More than the vocabulary is all of it.
                top_k=min(request.top_k, engine.vocab_size),
                stop=request.stop_sequences,
                grammar=plan.grammar,
            ),
            is_stream=request.stream,
            text_frames=((head, tail),),
            make_parser=plan.make_parser,
        )

    def format_stream_start(self, context: MessagesContext, usage: base.Usage) -> bytes:
        """``message_start`` with the tokens of the prompt; where only text can follow, its block begins."""
        message = _make_message(context, None, None, usage)
        frame = sse.format_event("message_start", {"type": "message_start", "message": message})
        return frame if context.make_parser is not None else frame + _open_block(context.block, "text")

    def format_piece(self, context: MessagesContext, index: int, piece: Piece) -> bytes:
        """``content_block_delta``, and the end and the beginning of blocks around it."""
        block = context.block
        if isinstance(piece, Text):
            if not piece.text:
                return b""
            begin = b"" if block.kind == "text" else _open_block(block, "text")
            return begin + _format_delta(block.index, {"type": "text_delta", "text": piece.text})
        if isinstance(piece, CallStart):
            return _open_block(block, "tool_use", id=piece.id, name=piece.name)
        if isinstance(piece, CallArguments):
            return _format_delta(block.index, {"type": "input_json_delta", "partial_json": piece.text})
        return b""

    def format_choice_end(self, context: MessagesContext, choice: base.Choice) -> bytes:
        """``content_block_stop``; an answer without anything is a block of no text."""
        begin = _open_block(context.block, "text") if context.block.index < 0 else b""
        return begin + _close_block(context.block)

    def format_stream_end(
        self, context: MessagesContext, choices: Sequence[base.Choice], usage: base.Usage
    ) -> bytes:
        """``message_delta``, ``message_stop``, the end marker."""
        choice = choices[0]
        delta = {"stop_reason": _name_reason(choice), "stop_sequence": choice.stop_string}
        described = {"type": "message_delta", "delta": delta, "usage": _describe_usage(usage)}
        stop = sse.format_event("message_stop", {"type": "message_stop"})
        return sse.format_event("message_delta", described) + stop + sse.DONE

    def format_stream_error(self, problem: Problem, request_id: str) -> bytes:
        """``error``: no end marker follows."""
        body = {"type": "error", "error": problem.as_error(), "request_id": request_id}
        return sse.format_event("error", body)

    def format_response(
        self, context: MessagesContext, choices: Sequence[base.Choice], usage: base.Usage
    ) -> bytes:
        """A ``message`` object."""
        choice = choices[0]
        blocks = list(_encode_blocks(choice.pieces)) or [sse.encode_json({"type": "text", "text": ""})]
        message = _make_message(context, _name_reason(choice), choice.stop_string, usage)
        # Quotes inside of strings are escaped: there is no other such place.
        head, tail = sse.encode_json(message).split(b'"content":[]')
        return b'%b"content":[%b]%b' % (head, b",".join(blocks), tail)


def _encode_blocks(pieces: Sequence[Piece]) -> Iterator[bytes]:
    """Blocks of a whole answer. What a tool gets is JSON as it is, though no float may hold its numbers."""
    arguments = {piece.index: piece.text for piece in pieces if isinstance(piece, CallArguments)}
    for piece in pieces:
        if isinstance(piece, Text) and piece.text:
            yield sse.encode_json({"type": "text", "text": piece.text})
        elif isinstance(piece, CallStart):
            block = sse.encode_json({"type": "tool_use", "id": piece.id, "name": piece.name})
            yield b'%b,"input":%b}' % (block[:-1], _escape(arguments[piece.index]))


def _escape(text: str) -> bytes:
    """JSON text in ASCII."""
    return _BEYOND_ASCII.sub(lambda match: sse.encode_text(match[0])[1:-1].decode(), text).encode("ascii")


def _open_block(block: OpenBlock, kind: BlockKind, **fields: str) -> bytes:
    """End the block that is open, and begin one."""
    end = _close_block(block)
    block.index += 1
    block.kind = kind
    content = {"type": kind, "text": ""} if kind == "text" else {"type": kind, **fields, "input": {}}
    start = {"type": "content_block_start", "index": block.index, "content_block": content}
    return end + sse.format_event("content_block_start", start)


def _close_block(block: OpenBlock) -> bytes:
    """End the block that is open, if one is."""
    if block.kind is None:
        return b""
    block.kind = None
    return sse.format_event("content_block_stop", {"type": "content_block_stop", "index": block.index})


def _name_reason(choice: base.Choice) -> str:
    return "stop_sequence" if choice.stop_string is not None else _STOP_REASONS[choice.finish_reason]


def _make_message(
    context: MessagesContext,
    stop_reason: str | None,
    stop_sequence: str | None,
    usage: base.Usage,
) -> dict[str, Any]:
    return {
        "id": context.id,
        "type": "message",
        "role": "assistant",
        "model": context.model,
        "content": [],
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


def _format_delta(index: int, delta: dict[str, str]) -> bytes:
    return sse.format_event(
        "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
    )
