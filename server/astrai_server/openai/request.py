"""Bodies of OpenAI's requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from astrai_server import builder as base
from astrai_server.field import (
    at_least,
    between,
    no_longer_than,
    not_empty,
    not_yet,
    refuse,
    refuse_unsupported,
    stop_strings,
)
from astrai_server.openai.message import ChatMessage
from astrai_server.openai.tool import (
    NamedToolChoice,
    ResponseFormat,
    ToolDefinition,
    distinct_tools,
    tool_choice,
)
from astrai_server.wire import describe_value
from astrai_triton.engine.params import SamplingParams

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


@attrs.frozen(kw_only=True)
class StreamOptions:
    """Options of a stream."""

    include_usage: bool | None = None
    """None leaves the choice to the server."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


@attrs.frozen(kw_only=True)
class SamplingRequest:
    """What both bodies have in common."""

    model: str | None = attrs.field(default=None, validator=no_longer_than(base.MAX_MODEL_NAME))
    """Comes back in the response; None is the name of the served model."""
    temperature: float = attrs.field(default=1.0, validator=between(0, 2))
    top_p: float = attrs.field(default=1.0, validator=between(0, 1))
    top_k: int = attrs.field(default=50, validator=at_least(-1))
    min_p: float = attrs.field(default=0.0, validator=between(0, 1))
    min_tokens: int = attrs.field(default=0, validator=at_least(0))
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | tuple[str, ...] | None = attrs.field(
        default=None, validator=stop_strings(base.MAX_STOPS, base.MAX_STOP_CHARS)
    )
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), validator=no_longer_than(base.MAX_STOP_IDS))
    ignore_eos: bool = False
    seed: int | None = attrs.field(default=None, validator=between(-(2**63), 2**63 - 1))
    """Choice ``j`` of several is drawn with seed + ``j``."""
    presence_penalty: float = attrs.field(default=0.0, validator=between(-2, 2))
    frequency_penalty: float = attrs.field(default=0.0, validator=between(-2, 2))
    repetition_penalty: float = attrs.field(default=1.0, validator=between(0.01, 100))
    logit_bias: Mapping[str, float] = attrs.field(factory=dict)
    """Token id, as a string, -> added to its logit, -100 to 100."""
    n: int = attrs.field(default=1, validator=between(1, MAX_CHOICES))

    @logit_bias.validator
    def _check_bias(self, _: object, value: Mapping[str, float]) -> None:
        for key, bias in value.items():
            if not _TOKEN_ID.fullmatch(key):
                refuse("logit_bias", f"wanted a token id, got the key {describe_value(key)}", key)
            if not -100 <= bias <= 100:
                refuse("logit_bias", f"wanted -100 to 100, got {describe_value(bias)}", key)

    def make_params(self, max_tokens: int, vocab_size: int, **fields: Any) -> SamplingParams:
        """Parameters of the engine.

        Args:
            max_tokens: tokens to sample at most.
            vocab_size: of the model.
            fields: what the request says beyond this class.

        Raises:
            InvalidRequestError: a token id outside of the vocabulary.
        """
        base.check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        for key in self.logit_bias:
            if int(key) >= vocab_size:
                refuse("logit_bias", f"wanted token ids 0 to {vocab_size - 1}", key)
        return base.make_params(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            temperature=self.temperature,
            # More than the vocabulary is all of it.
            top_k=min(self.top_k, vocab_size),
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(key): bias for key, bias in self.logit_bias.items()},
            seed=self.seed,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            **fields,
        )


@attrs.frozen(kw_only=True)
class ChatCompletionRequest(SamplingRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: tuple[ChatMessage, ...] = attrs.field(validator=not_empty)
    max_tokens: int = attrs.field(default=2048, validator=at_least(0))
    max_completion_tokens: int | None = attrs.field(default=None, validator=at_least(0))
    """Wins over ``max_tokens``."""
    logprobs: bool = False
    top_logprobs: int = attrs.field(default=0, validator=between(0, MAX_TOP_LOGPROBS))
    """Alternatives to tell with each token; needs ``logprobs``."""
    tools: tuple[ToolDefinition, ...] = attrs.field(default=(), validator=distinct_tools)
    tool_choice: str | NamedToolChoice | None = attrs.field(default=None, validator=tool_choice)
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    functions: Any = attrs.field(default=None, validator=not_yet([]))
    function_call: Any = attrs.field(default=None, validator=not_yet("none", "auto"))
    modalities: Any = attrs.field(default=None, validator=not_yet(["text"], []))
    audio: Any = attrs.field(default=None, validator=not_yet())
    moderation: Any = attrs.field(default=None, validator=not_yet())
    prediction: Any = attrs.field(default=None, validator=not_yet())
    web_search_options: Any = attrs.field(default=None, validator=not_yet())

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {
            "cache_control",
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "reasoning_effort",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
            "verbosity",
        }
    )
    """Accepted, and changes nothing."""

    def __attrs_post_init__(self) -> None:
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", f"wanted logprobs to be true for {self.top_logprobs} alternatives")

    @property
    def token_limit(self) -> int:
        """Tokens asked for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


@attrs.frozen(kw_only=True)
class CompletionRequest(SamplingRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Any = attrs.field()
    """A text, a list of them, the token ids of one, or a list of those."""
    max_tokens: int = attrs.field(default=16, validator=at_least(0))
    """Of several prompts, the longest decides what the context allows."""
    echo: bool = False
    """Give the prompt back before its completion."""
    logprobs: int | None = attrs.field(default=None, validator=between(0, MAX_TOP_LOGPROBS))
    """Alternatives to tell with each token; with ``echo`` of the prompt, too. None: no log-probabilities."""
    best_of: int | None = attrs.field(default=None, validator=between(1, MAX_CHOICES))
    suffix: Any = attrs.field(default=None, validator=not_yet(""))

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"metadata", "service_tier", "store", "user"})

    @prompt.validator
    def _check_prompt(self, _: object, value: Any) -> None:
        if isinstance(value, str):
            return
        if type(value) is not list:
            refuse("prompt", f"wanted text, token ids or a list of those, got {describe_value(value)}")
        if not value:
            refuse("prompt", "wanted at least one prompt or token, got an empty list")
        kind = type(value[0])
        if kind not in (str, int, list):
            refuse("prompt", f"wanted text, a token id or a list of those, got {describe_value(value[0])}", 0)
        for i, item in enumerate(value):
            if type(item) is not kind:
                message = f"wanted the same kind of value as the first, got {describe_value(item)}"
                refuse("prompt", message, i)
            if kind is list:
                _check_ids(item, i)

    def __attrs_post_init__(self) -> None:
        if self.best_of not in (None, self.n):
            message = f"wanted what n is ({self.n}), got {self.best_of}: this server gives every choice back"
            refuse_unsupported("best_of", message)
        num_choices = self.n * len(self.prompts)
        if num_choices > MAX_CHOICES:
            refuse("prompt", f"wanted at most {MAX_CHOICES} prompts times n, got {num_choices}")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """All prompts."""
        return list(self.prompt) if self.has_several_prompts else [self.prompt]

    @property
    def has_several_prompts(self) -> bool:
        """Whether ``prompt`` is a list of prompts, though it may be of one."""
        return not isinstance(self.prompt, str) and not isinstance(self.prompt[0], int)


def _check_ids(value: list[Any], *path: int) -> None:
    if not value:
        refuse("prompt", "wanted at least one token, got an empty list", *path)
    for i, token_id in enumerate(value):
        if type(token_id) is not int:
            refuse("prompt", f"wanted a token id, got {describe_value(token_id)}", *path, i)
