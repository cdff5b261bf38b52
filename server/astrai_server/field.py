"""Checks for the fields of request classes.

Each raises ``InvalidRequestError`` with the field's name as its path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import attrs

from astrai_server.wire import InvalidRequestError, Issue, describe_value

MAX_TOOLS = 512

_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}", re.ASCII)

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def between(low: float, high: float) -> Validator:
    """A number in ``[low, high]``; None passes."""

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and not low <= value <= high:
            refuse(field.name, f"wanted {low} to {high}, got {describe_value(value)}")

    return check


def at_least(low: int) -> Validator:
    """A number ``>= low``; None passes."""

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and value < low:
            refuse(field.name, f"wanted {low} or more, got {describe_value(value)}")

    return check


def not_empty(_: object, field: attrs.Attribute[Any], value: Sequence[Any]) -> None:
    """A list with something in it."""
    if not value:
        refuse(field.name, "wanted at least one item, got an empty list")


def no_longer_than(limit: int) -> Validator:
    """A list or string of at most ``limit`` items or characters; None passes."""

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and len(value) > limit:
            unit = "characters" if isinstance(value, str) else "items"
            refuse(field.name, f"wanted at most {limit} {unit}, got {len(value)}")

    return check


def stop_strings(limit: int, max_chars: int) -> Validator:
    """A string or at most ``limit`` of them, each of 1 to ``max_chars`` characters; None passes."""

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        if value is None:
            return
        strings = (value,) if isinstance(value, str) else value
        no_longer_than(limit)(None, field, strings)
        for i, text in enumerate(strings):
            if not 0 < len(text) <= max_chars:
                path = () if isinstance(value, str) else (i,)
                refuse(field.name, f"wanted 1 to {max_chars} characters, got {len(text)}", *path)

    return check


def function_name(_: object, field: attrs.Attribute[Any], value: str) -> None:
    """A name that can be written into a prompt and found again in an answer."""
    if not _FUNCTION_NAME.fullmatch(value):
        message = f"wanted 1 to 128 letters, digits and any of _ - . :, got {describe_value(value)}"
        refuse(field.name, message)


def check_names(field_name: str, names: Sequence[str], *path: str) -> None:
    """Refuse tools of which two have one name, and more than ``MAX_TOOLS``.

    Args:
        field_name: the list of tools.
        names: of each.
        path: from a tool to its name.
    """
    if len(names) > MAX_TOOLS:
        refuse(field_name, f"wanted at most {MAX_TOOLS} tools, got {len(names)}")
    seen: set[str] = set()
    for i, name in enumerate(names):
        if name in seen:
            refuse(field_name, f"wanted tools of different names, got {describe_value(name)} twice", i, *path)
        seen.add(name)


def one_of(*known: str) -> Validator:
    """One of ``known``; anything else is called unsupported."""

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        if value not in known:
            message = f"{describe_value(value)} is not supported; supported: {', '.join(known)}"
            refuse_unsupported(field.name, message)

    return check


def not_yet(
    *harmless: Any, hint: str = "leave it out", details: Mapping[str, Any] | None = None
) -> Validator:
    """Nothing: the field belongs to a feature this server does not have. None passes.

    Args:
        harmless: values that ask for nothing, and pass too.
        hint: what to do instead.
        details: of the error, for clients that act on them.
    """

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        # The type is compared too: true is not 1.
        if value is not None and not any(type(value) is type(item) and value == item for item in harmless):
            message = f"is not supported by this server; {hint}"
            raise InvalidRequestError(Issue((field.name,), message, is_unsupported=True, details=details))

    return check


def refuse(name: str, message: str, *path: str | int) -> NoReturn:
    """Raise for a wrong value at ``name`` + ``path``."""
    raise InvalidRequestError(Issue((name, *path), message))


def refuse_unsupported(name: str, message: str, *path: str | int) -> NoReturn:
    """Raise for a value that means something this server does not do."""
    raise InvalidRequestError(Issue((name, *path), message, is_unsupported=True))
