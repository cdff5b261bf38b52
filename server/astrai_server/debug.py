"""``/debug/prefix``: what the prefix cache would give a prompt, and which token keeps it from giving more."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from astrai_server.anthropic import AnthropicResponseBuilder, MessagesRequest
from astrai_server.builder import check_token_ids
from astrai_server.field import refuse
from astrai_server.openai import ChatCompletionRequest, OpenAIResponseBuilder
from astrai_server.wire import describe_value

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine


_PROMPTS = ("prompt", "token_ids", "chat", "message")


@attrs.frozen(kw_only=True)
class PrefixRequest:
    """A prompt to look up, in one of four forms.

    Raises:
        InvalidRequestError: none of them is given or several are, or the prompt is empty.
    """

    prompt: str | None = None
    """Text, taken without a chat template."""
    token_ids: tuple[int, ...] | None = None
    chat: ChatCompletionRequest | None = None
    """A request as it would be sent to ``/v1/chat/completions``; its prompt counts."""
    message: MessagesRequest | None = None
    """A request as it would be sent to ``/v1/messages``; its prompt counts."""
    salt: str | None = None

    def __attrs_post_init__(self) -> None:
        given = [name for name in _PROMPTS if getattr(self, name) is not None]
        if len(given) != 1:
            refuse("prompt", f"wanted one of {', '.join(_PROMPTS)}, got {' and '.join(given) or 'none'}")
        if not getattr(self, given[0]):
            refuse(given[0], "wanted at least one token, got none")


def read_query(query: Mapping[str, str]) -> PrefixRequest:
    """Make a request of a URL's query; ``token_ids`` are numbers with commas between them.

    Raises:
        InvalidRequestError: as ``PrefixRequest``; an unknown or malformed parameter.
    """
    for name in query:
        if name not in ("prompt", "token_ids", "salt"):
            refuse(name, "is unknown in a query; known: prompt, token_ids, salt")
    token_ids = query.get("token_ids")
    return PrefixRequest(
        prompt=query.get("prompt"),
        token_ids=None if token_ids is None else _parse_token_ids(token_ids),
        salt=query.get("salt"),
    )


async def describe_prefix(
    request: PrefixRequest, engine: InferenceEngine, owner: str | None
) -> dict[str, Any]:
    """Look a prompt up between two steps.

    Args:
        request: what to look up.
        engine: whose cache.
        owner: the salt that all requests of this client have; None lets it ask for any.

    Returns:
        The body of the answer: the counts of ``PrefixReport``, its pages, and the first difference with the
        text of both tokens.

    Raises:
        InvalidRequestError: a token outside of the vocabulary, or the salt of somebody else.
        ChatTemplateError, AdmissionError: as for the request that is looked up.
        EngineUnavailableError: the engine is not running.
    """
    if owner is not None and request.salt not in (None, owner):
        refuse("salt", f"wanted {describe_value(owner)} or none: prefixes of other API keys are kept apart")
    salt = request.salt if owner is None else owner
    token_ids = await asyncio.to_thread(_tokenize, request, engine)
    report = await asyncio.wrap_future(engine.explain_prefix(token_ids, salt))
    body = attrs.asdict(report) | {"salt": salt}
    if report.difference is not None:
        for side in ("asked", "cached"):
            token_id = getattr(report.difference, side)
            body["difference"][side] = {"id": token_id, "text": _decode(engine, token_id)}
    return body


def _tokenize(request: PrefixRequest, engine: InferenceEngine) -> Sequence[int]:
    if request.chat is not None:
        return OpenAIResponseBuilder().prepare(request.chat, engine).prompts[0]
    if request.message is not None:
        return AnthropicResponseBuilder().prepare(request.message, engine).prompts[0]
    if request.prompt is not None:
        return engine.tokenizer.encode(request.prompt)
    token_ids = request.token_ids or ()
    check_token_ids("token_ids", token_ids, engine.vocab_size)
    return token_ids


def _parse_token_ids(text: str) -> tuple[int, ...]:
    items = text.strip().removeprefix("[").removesuffix("]").split(",")
    for item in items:
        if not (item.strip().isdecimal() and item.isascii() and len(item.strip()) <= 10):
            refuse("token_ids", f"wanted token ids with commas between them, got {describe_value(item)}")
    return tuple(int(item) for item in items)


def _decode(engine: InferenceEngine, token_id: int) -> str:
    """Text of a token alone; bytes that are no whole character become U+FFFD."""
    decoder = engine.tokenizer.detokenizer()
    return decoder.push(token_id) + decoder.flush()
