"""What a protocol must provide: how a request becomes a prompt, and how an answer becomes bytes."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, cast

import attrs

from astrai_server.problem import Problem
from astrai_server.wire import InvalidRequestError, Issue
from astrai_triton.engine.params import SamplingParams

if TYPE_CHECKING:
    from astrai_triton.engine import FinishReason, InferenceEngine

MAX_MODEL_NAME = 256
"""Characters; the name comes back in every chunk."""
MAX_STOPS = 128
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024


@attrs.frozen(kw_only=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""
    completion_tokens: int = 0
    """Sampled, the stop token included."""


@attrs.frozen(kw_only=True)
class Outcome:
    """How an answer ended."""

    finish_reason: FinishReason
    """Only stop or length: anything else is an error and reaches the client as one."""
    stop_string: str | None
    usage: Usage
    text: str = ""
    """The whole answer; empty at the end of a stream."""


@attrs.frozen(kw_only=True, eq=False)
class Context:
    """One request, ready to run, and what all frames of its answer share."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    is_stream: bool
    chunk_head: bytes
    """Bytes of a text frame before the JSON string of the text."""
    chunk_tail: bytes
    """Bytes after it."""


RequestT = TypeVar("RequestT")
ContextT = TypeVar("ContextT", bound=Context)


class ResponseBuilder(ABC, Generic[RequestT, ContextT]):
    """One protocol. Stateless: whatever belongs to a request is in its context."""

    request_type: ClassVar[type[Any]]
    """Class the body is read as."""
    awaits_prefill: ClassVar[bool] = False
    """Whether the first frame needs the number of cached tokens, known once prefill begins."""

    @abstractmethod
    def prepare(self, request: RequestT, engine: InferenceEngine) -> ContextT:
        """Render, tokenise and limit. May take long; runs outside of the event loop.

        Raises:
            InvalidRequestError: a field that cannot be carried out.
            ChatTemplateError: the chat template refused the conversation.
            AdmissionError: the prompt leaves no room.
        """

    @abstractmethod
    def format_stream_start(self, context: ContextT, usage: Usage) -> bytes:
        """Frames before the first text."""

    @abstractmethod
    def format_chunk(self, context: ContextT, text: str) -> bytes:
        """The frame of a piece of text; ``text`` is not empty."""

    @abstractmethod
    def format_stream_end(self, context: ContextT, outcome: Outcome) -> bytes:
        """Frames after the last text, the end marker included."""

    @abstractmethod
    def format_stream_error(self, problem: Problem, request_id: str) -> bytes:
        """The frame that ends a stream which failed."""

    @abstractmethod
    def format_response(self, context: ContextT, outcome: Outcome) -> bytes:
        """The body of a whole answer."""


class ChatCodec(Protocol):
    """What the server asks of the engine's tokenizer."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> list[int]: ...


def encode_chat(
    engine: InferenceEngine, messages: Sequence[Mapping[str, Any]], *, continue_final: bool = False
) -> list[int]:
    """Render and tokenise a conversation.

    Args:
        messages: mappings with ``role`` and ``content`` (text).
        continue_final: the answer goes on where the last message stops.

    Raises:
        ChatTemplateError: the chat template refused the conversation.
        InvalidRequestError: a text that cannot be tokenised.
    """
    codec = cast(ChatCodec, engine.tokenizer)
    try:
        return codec.encode_chat(
            messages, add_generation_prompt=not continue_final, continue_final=continue_final
        )
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(Issue(("messages",), str(error))) from error


def limit_tokens(engine: InferenceEngine, prompt_len: int, wanted: int) -> int:
    """Tokens to sample at most: ``wanted``, or what is left of the context if that is less.

    Raises:
        ContextLengthError: the prompt leaves no room in the context.
        PoolTooSmallError: the prompt leaves no room in the KV pool.
    """
    return min(wanted, engine.room_for(prompt_len))


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ``InvalidRequestError`` for the first id outside of the vocabulary."""
    for i, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(Issue((name, i), f"wanted 0 to {vocab_size - 1}, got {token_id}"))


def make_params(**fields: Any) -> SamplingParams:
    """Build the engine's parameters; what they refuse is the client's mistake."""
    try:
        return SamplingParams(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(Issue((), str(error))) from error


def new_id(prefix: str) -> str:
    """A fresh id such as ``chatcmpl-…``."""
    return f"{prefix}{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())
