"""What both OpenAI routes have in common: usage, log-probabilities, the last frames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import attrs

from astrai_server import builder as base
from astrai_server import sse
from astrai_server.openai.request import StreamOptions
from astrai_triton.engine.result import TokenLogprob

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine

UsageFrame = Literal["compat", "openai", "seed"]
"""``api.usage_frame``: how a stream reports its usage where the request does not say."""

UsageForm = Literal["official", "compat", "seed", "none"]


class TokenSpeller(Protocol):
    """What is asked of the engine's tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str: ...


@attrs.frozen(kw_only=True, eq=False)
class OpenAIContext(base.Context):
    """One request of either route."""

    head: Mapping[str, Any]
    """What all frames begin with."""
    usage_form: UsageForm
    """Of the frame with the usage."""
    has_logprobs: bool = False
    tokenizer: TokenSpeller


def speller_of(engine: InferenceEngine) -> TokenSpeller:
    """The engine's tokenizer."""
    return cast(TokenSpeller, engine.tokenizer)


def choose_usage_form(usage_frame: UsageFrame, options: StreamOptions | None) -> UsageForm:
    """How a stream reports its usage."""
    if options is not None and options.include_usage is not None:
        return "official" if options.include_usage else "none"
    return "none" if usage_frame == "openai" else usage_frame


def mark_usage(chunk: dict[str, Any], usage_form: UsageForm) -> dict[str, Any]:
    """Tell who asked for a frame with the usage that this is not it."""
    return chunk | ({"usage": None} if usage_form == "official" else {})


def format_usage(context: OpenAIContext, usage: base.Usage, chunk: dict[str, Any]) -> bytes:
    """The frame with the usage, if there is one.

    Args:
        chunk: a chunk of choice 0 that says nothing.
    """
    if context.usage_form == "none":
        return b""
    if context.usage_form == "seed":
        return sse.format_data(count_tokens(usage))
    chunk = chunk | {"usage": describe_usage(usage)}
    if context.usage_form == "official":
        return sse.format_data(chunk | {"choices": []})
    return sse.format_data(chunk | count_tokens(usage))


def count_tokens(usage: base.Usage) -> dict[str, Any]:
    """Tokens, by OpenAI's names."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def describe_usage(usage: base.Usage) -> dict[str, Any]:
    """Tokens, with those found in the prefix cache."""
    return count_tokens(usage) | {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}


def spell_token(tokenizer: TokenSpeller, token_id: int) -> tuple[str, bytes]:
    """A token as text and as bytes; special tokens by their names."""
    data = tokenizer.token_bytes(token_id)
    if not data:
        text = tokenizer.decode([token_id], skip_special=False)
        return text, text.encode()
    return data.decode("utf-8", "replace"), data


def describe_logprobs(tokenizer: TokenSpeller, entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Entries of ``logprobs.content``."""
    return [
        _describe_entry(tokenizer, entry.token_id, entry.logprob)
        | {"top_logprobs": [_describe_entry(tokenizer, *alternative) for alternative in entry.top]}
        for entry in entries
    ]


def _describe_entry(tokenizer: TokenSpeller, token_id: int, logprob: float) -> dict[str, Any]:
    text, data = spell_token(tokenizer, token_id)
    return {"token": text, "logprob": logprob, "bytes": list(data)}
