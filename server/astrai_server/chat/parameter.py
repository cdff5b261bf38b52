"""Parameters of the requests: what people type -> what the server gets."""

from __future__ import annotations

import difflib
import json
import math
import re
from typing import Any

KNOWN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "response_format",
    "reasoning_effort",
    "service_tier",
    "user",
)
"""Names that are common; a server may know more."""

_NOT_HERE = {
    "model": "use /model NAME",
    "messages": "the conversation makes them",
    "system": "use /system TEXT",
    "stream": "answers are always streamed",
    "stream_options": "usage is always asked for",
    "n": "one answer is shown per question",
    "tools": "this chat runs no tools",
    "tool_choice": "this chat runs no tools",
}


class _NumberError(ValueError):
    """A number beyond those of JSON."""


_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def check_name(name: str) -> None:
    """Refuse names that no parameter can have.

    Raises:
        ValueError: ``name`` is not one, or the chat sets it itself.
    """
    if name in _NOT_HERE:
        raise ValueError(f"{name} cannot be set: {_NOT_HERE[name]}")
    if not _NAME.fullmatch(name):
        raise ValueError(f"wanted the name of a parameter, such as temperature, got {name!r}")


def parse_value(text: str) -> Any:
    """JSON where it is JSON, else the text itself.

    Raises:
        ValueError: a number that JSON has not.
    """

    def refuse(number: str) -> Any:
        raise _NumberError(f"wanted a number that JSON can carry, got {number}")

    def read_float(number: str) -> float:
        value = float(number)
        return value if math.isfinite(value) else refuse(number)

    try:
        return json.loads(text, parse_constant=refuse, parse_float=read_float)
    except _NumberError:
        raise
    except (ValueError, RecursionError):
        return text


def suggest(name: str) -> str | None:
    """The known name that ``name`` looks like; None if it is known or looks like none."""
    if name in KNOWN:
        return None
    return next(iter(difflib.get_close_matches(name, KNOWN, n=1)), None)
