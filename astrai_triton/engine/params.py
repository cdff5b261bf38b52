"""What a caller may ask of the sampler, checked once, before a task exists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from astrai_triton.grammar.spec import Grammar

# Below this temperature the most likely token is always taken.
GREEDY_BELOW = 1e-5
# Alternatives that may be reported with a token: what clients of either protocol may ask for.
MAX_TOP_LOGPROBS = 20


def _in_range(low: float, high: float) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{attribute.name}: wanted a number, got {value!r}")
        # NaN fails every comparison.
        if not low <= value <= high:
            raise ValueError(f"{attribute.name}: wanted {low} to {high}, got {value}")

    return check


def _count(low: int) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{attribute.name}: wanted an integer, got {value!r}")
        if value < low:
            raise ValueError(f"{attribute.name}: wanted >= {low}, got {value}")

    return check


def _num_alternatives(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    _count(0)(None, attribute, value)
    if value > MAX_TOP_LOGPROBS:
        raise ValueError(f"{attribute.name}: wanted 0 to {MAX_TOP_LOGPROBS}, got {value}")


def _flag(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{attribute.name}: wanted True or False, got {value!r}")


def _strings(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, tuple) or any(not isinstance(item, str) for item in value):
        raise TypeError(f"{attribute.name}: wanted a string or several, got {value!r}")
    if "" in value:
        raise ValueError(f"{attribute.name}: wanted strings that are not empty, got {value!r}")


def _token_ids(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, tuple):
        raise TypeError(f"{attribute.name}: wanted a sequence of token ids, got {value!r}")
    for token_id in value:
        _count(0)(None, attribute, token_id)


def _bias(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{attribute.name}: wanted a mapping from token id to number, got {value!r}")
    for token_id, bias in value.items():
        _count(0)(None, attribute, token_id)
        _in_range(-100.0, 100.0)(None, attribute, bias)


def _grammar(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Grammar):
        raise TypeError(
            f"{attribute.name}: wanted a Grammar (of Grammar.json_schema, lark or regex), got {value!r}"
        )


def _to_tuple(value: Any) -> Any:
    """A tuple of what is iterable, a lone string being one item. Anything else is for the validator."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else value


def _to_frozen(value: Any) -> Any:
    """A read-only copy of a mapping. Anything else is for the validator."""
    return MappingProxyType(dict(value)) if isinstance(value, Mapping) else value


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How one task is sampled and when it ends. Immutable.

    Order of the sampler: penalties, logit_bias, grammar, temperature, top-k, top-p, min-p, draw.

    Raises:
        TypeError: a field has the wrong type (a bool is not a number).
        ValueError: a field is out of range; the text names field, range and value.
    """

    max_tokens: int | None = attrs.field(default=None, validator=attrs.validators.optional(_count(0)))
    """Tokens to sample at most; None is what the context allows; 0 only prefills."""
    min_tokens: int = attrs.field(default=0, validator=_count(0))
    """No stop id is sampled before this many tokens."""
    temperature: float = attrs.field(default=1.0, validator=_in_range(0.0, 2.0))
    """0 is greedy; so is anything below 1e-5."""
    top_k: int = attrs.field(default=0, validator=_count(-1))
    """0 or -1: off. Ties at the border go to the lower token id."""
    top_p: float = attrs.field(default=1.0, validator=_in_range(0.0, 1.0))
    """Smallest set of tokens whose probability reaches this; 0 keeps one token."""
    min_p: float = attrs.field(default=0.0, validator=_in_range(0.0, 1.0))
    """Drop tokens below this share of the most likely one."""
    presence_penalty: float = attrs.field(default=0.0, validator=_in_range(-2.0, 2.0))
    """Subtracted once from the logit of every token already generated."""
    frequency_penalty: float = attrs.field(default=0.0, validator=_in_range(-2.0, 2.0))
    """Subtracted once per occurrence in the generated tokens."""
    repetition_penalty: float = attrs.field(default=1.0, validator=_in_range(0.01, 100.0))
    """Divides positive and multiplies negative logits of generated tokens (CTRL, arXiv 1909.05858)."""
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_to_frozen, validator=_bias)
    """Token id -> added to its logit, -100 to 100."""
    seed: int | None = attrs.field(default=None, validator=attrs.validators.optional(_count(-(2**63))))
    """Same seed, same text: alone, batched or preempted. Its lowest 64 bits count. None: one is drawn."""
    stop: tuple[str, ...] = attrs.field(default=(), converter=_to_tuple, validator=_strings)
    """Text that ends the answer; never part of it. The earliest match wins."""
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_to_tuple, validator=_token_ids)
    """Token ids that end the answer beside the tokenizer's own."""
    ignore_eos: bool = attrs.field(default=False, validator=_flag)
    """Go on through the tokenizer's stop ids; ``stop_token_ids`` still end."""
    logprobs: bool = attrs.field(default=False, validator=_flag)
    """Report the log-probability of each sampled token (of the distribution before temperature and cuts)."""
    top_logprobs: int = attrs.field(default=0, validator=_num_alternatives)
    """Most likely tokens reported with each token, 0 to 20; more than 0 wants ``logprobs``."""
    prompt_logprobs: bool = attrs.field(default=False, validator=_flag)
    """Report the log-probabilities of the prompt's own tokens, with ``top_logprobs`` alternatives, in the
    first event. Nothing is read from the prefix cache then: every position must pass through the model."""
    grammar: Grammar | None = attrs.field(default=None, validator=attrs.validators.optional(_grammar))
    """What the answer must match; tokens that would break it are never drawn."""

    def __attrs_post_init__(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                f"top_logprobs: wanted logprobs=True beside it, got top_logprobs={self.top_logprobs} alone; "
                "set logprobs=True, or top_logprobs=0"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler needs the counts of the generated tokens."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def check_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Check the token ids that a caller named against the model's vocabulary.

    Raises:
        ValueError: an id in ``logit_bias`` or ``stop_token_ids`` is ``vocab_size`` or more.
    """
    for name, token_ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if token_ids and max(token_ids) >= vocab_size:
            raise ValueError(
                f"{name}: wanted token ids below {vocab_size} (the vocabulary), got {max(token_ids)}"
            )


def merge_params(params: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a call that takes them whole or field by field.

    Raises:
        TypeError: both were given.
    """
    if params is not None and fields:
        raise TypeError(
            f"params: wanted either params or its fields, got both (params and {', '.join(fields)})"
        )
    return params if params is not None else SamplingParams(**fields)
