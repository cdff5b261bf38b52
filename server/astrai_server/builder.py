"""What a protocol must provide: how a request becomes a prompt, and how an answer becomes bytes."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import attrs

from astrai_server import sse
from astrai_server.answer import Piece, Text
from astrai_server.problem import Problem
from astrai_server.wire import InvalidRequestError, Issue
from astrai_triton.engine.params import SamplingParams
from astrai_triton.errors import GrammarError
from astrai_triton.grammar import Grammar

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine
    from astrai_triton.engine.result import TokenLogprob

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


FinishName = Literal["stop", "length", "tool_calls"]


@attrs.frozen(kw_only=True)
class Choice:
    """How one choice of an answer ended, and what it says."""

    index: int
    finish_reason: FinishName
    """Anything else is an error, and reaches the client as one."""
    stop_string: str | None = None
    pieces: tuple[Piece, ...] = ()
    """The whole answer, joined as far as it goes; empty at the end of a stream."""

    @property
    def text(self) -> str:
        """All text."""
        return "".join([piece.text for piece in self.pieces if isinstance(piece, Text)])

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of all tokens."""
        return tuple(entry for piece in self.pieces if isinstance(piece, Text) for entry in piece.logprobs)


class AnswerParser(Protocol):
    """Finds the calls of tools in the text of a choice."""

    def push(self, text: str) -> list[Piece]: ...

    def flush(self) -> list[Piece]: ...

    @property
    def num_calls(self) -> int: ...

    @property
    def is_done(self) -> bool: ...


@attrs.frozen(kw_only=True, eq=False)
class Context:
    """One request, ready to run, and what all frames of its answer share."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    num_choices: int = 1
    """Of each prompt; choice ``j`` of prompt ``i`` has the index ``i * num_choices + j``."""
    params: SamplingParams
    is_stream: bool
    text_frames: Sequence[tuple[bytes, bytes]]
    """For each choice, the bytes of a text frame before and after the JSON string of the text."""
    make_parser: Callable[[], AnswerParser] | None = None
    """For the text of each choice; None: it is text and nothing else."""


RequestT = TypeVar("RequestT")
ContextT = TypeVar("ContextT", bound=Context)


class ResponseBuilder(ABC, Generic[RequestT, ContextT]):
    """One protocol. Stateless: whatever belongs to a request is in its context."""

    request_type: ClassVar[type[Any]]
    """Class the body is read as."""
    awaits_prefill: ClassVar[bool] = False
    """Whether the first frame needs the number of cached tokens, known once prefill begins."""

    prompt_field: ClassVar[str] = "messages"
    """Field to blame for a prompt that is too long."""

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

    def format_chunk(self, context: ContextT, text: str, index: int = 0) -> bytes:
        """The frame of a piece of text of choice ``index``; ``text`` is not empty."""
        head, tail = context.text_frames[index]
        return head + sse.encode_text(text) + tail

    @abstractmethod
    def format_piece(self, context: ContextT, index: int, piece: Piece) -> bytes:
        """The frames of any piece of choice ``index``."""

    @abstractmethod
    def format_choice_end(self, context: ContextT, choice: Choice) -> bytes:
        """Frames after the last piece of a choice."""

    @abstractmethod
    def format_stream_end(self, context: ContextT, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Frames after the last choice, the end marker included."""

    @abstractmethod
    def format_stream_error(self, problem: Problem, request_id: str) -> bytes:
        """The frame that ends a stream which failed."""

    @abstractmethod
    def format_response(self, context: ContextT, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The body of a whole answer."""


def limit_tokens(engine: InferenceEngine, prompt_len: int, wanted: int) -> int:
    """Tokens to sample at most: ``wanted``, or what is left of the context if that is less.

    Raises:
        ContextLengthError: the prompt leaves no room in the context.
        PoolTooSmallError: the prompt leaves no room in the KV pool.
    """
    return min(wanted, engine.room_for(prompt_len))


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int, *path: int) -> None:
    """Raise ``InvalidRequestError`` for the first id outside of the vocabulary.

    Args:
        path: from the field ``name`` to the ids.
    """
    for i, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                Issue((name, *path, i), f"wanted 0 to {vocab_size - 1}, got {token_id}")
            )


def check_grammar(engine: InferenceEngine, grammar: Grammar | None, *path: str | int) -> Grammar | None:
    """Compile a grammar; what cannot be enforced is the client's mistake.

    Args:
        path: of the field that it comes from.

    Raises:
        InvalidRequestError: it is malformed or asks for what is not supported.
    """
    if grammar is not None:
        try:
            engine.compile_grammar(grammar)
        except GrammarError as error:
            raise InvalidRequestError(Issue(path, str(error), is_unsupported=True)) from error
    return grammar


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
