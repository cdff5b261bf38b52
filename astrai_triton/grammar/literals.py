"""Values that a schema spells out: ``const`` and ``enum``."""

from __future__ import annotations

import math
from typing import Any

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.limits import MAX_NESTING
from astrai_triton.grammar.numbers import is_exact, is_number

_ESCAPED = frozenset("\b\f\n\r\t")

TYPES = ("null", "boolean", "number", "string", "array", "object")
"""Types of JSON values; an integer is a number."""


def type_of(value: Any) -> str:
    """The JSON type of a parsed value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if is_number(value):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def identify(value: Any) -> object:
    """A hashable key that equal JSON values share: 1 is 1.0, but not true."""
    if isinstance(value, list):
        return ("array", *map(identify, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, identify(item)) for name, item in value.items()))
    return (type_of(value), value)


def check_literal(value: Any, where: str, depth: int = 0) -> int:
    """Number of values inside of ``value``, itself included.

    Args:
        value: parsed JSON.
        where: place in the document, for errors.
        depth: lists and objects around ``value``.

    Raises:
        GrammarError: nested too deeply, a number that is not kept exactly, or a string with a character that
            is not written.
    """
    if depth > MAX_NESTING:
        raise GrammarError(f"{where}: nests more than {MAX_NESTING} brackets")
    if isinstance(value, list):
        return 1 + sum(check_literal(item, where, depth + 1) for item in value)
    if isinstance(value, dict):
        for name in value:
            check_text(name, where)
        return 1 + sum(check_literal(item, where, depth + 1) for item in value.values())
    if isinstance(value, str):
        check_text(value, where)
    elif is_number(value) and not (math.isfinite(value) and is_exact(value)):
        raise GrammarError(f"{where}: the number {str(value)[:80]} has more digits than are kept exactly")
    return 1


def check_text(text: str, where: str) -> None:
    """Refuse characters that a JSON string can only hold as an escape that is never written.

    One spelling for every text keeps a property from being repeated under another spelling of its name.

    Raises:
        GrammarError: there is such a character.
    """
    for char in text:
        if (char < " " and char not in _ESCAPED) or char == "\x7f":
            raise GrammarError(
                f"{where}: the control character U+{ord(char):04X} is not supported in strings"
            )
        if "\ud800" <= char <= "\udfff":
            raise GrammarError(f"{where}: a lone surrogate is no character")
