"""Request bodies: bytes -> JSON -> attrs objects. Types are exact, and every error says where it is.

What the reader refuses beyond the grammar of JSON: numbers that overflow, integers of more than
``MAX_INTEGER_DIGITS`` digits, nesting beyond ``MAX_DEPTH``, a key that appears twice in one object. NaN and
Infinity are no JSON. Lone surrogates become U+FFFD. ``null`` in an optional field is its default.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import islice
from types import GenericAlias, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs
from cattrs import ClassValidationError, Converter, IterableValidationError
from cattrs.gen import make_dict_structure_fn

MAX_DEPTH = 64
MAX_INTEGER_DIGITS = 20
MAX_ISSUES = 16

Hook = Callable[[Any, Any], Any]

_T = TypeVar("_T")

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class MalformedBodyError(ValueError):
    """The body is not JSON."""


@attrs.frozen
class Issue:
    """One thing that is wrong with a request."""

    path: tuple[str | int, ...]
    """Keys and indices from the top of the body to the field."""
    message: str
    is_unsupported: bool = False
    """The value is meaningful, this server just does not do it (yet)."""
    details: Mapping[str, Any] | None = None
    """For clients that can help themselves: ``error.details``."""

    @property
    def where(self) -> str:
        """The path as text: ``messages[2].content[0].type``; empty for the body itself."""
        text = ""
        for step in self.path:
            if isinstance(step, int):
                text += f"[{step}]"
            elif re.fullmatch(r"[A-Za-z_]\w*", step, re.ASCII):
                text += f".{step}" if text else step
            else:
                text += f"[{describe_value(step)}]"
        return text

    def __str__(self) -> str:
        return f"{self.where or 'body'}: {self.message}"


class InvalidRequestError(ValueError):
    """The body is JSON, but not a request that can be carried out.

    Args:
        issues: what is wrong, at least one, in the order of the fields.
    """

    def __init__(self, *issues: Issue) -> None:
        more = f" (and {len(issues) - 1} more)" if len(issues) > 1 else ""
        super().__init__(f"{issues[0]}{more}")
        self.issues = issues


def read_request(body: bytes, kind: type[_T]) -> tuple[_T, tuple[str, ...]]:
    """Read ``body`` as a request of class ``kind``.

    Returns:
        The request, and the fields that ``kind`` does not know (``messages[].x`` for nested ones).

    Raises:
        MalformedBodyError: not UTF-8 or not JSON.
        InvalidRequestError: a field has the wrong type or value, is missing or is not supported.
    """
    payload = parse_json(body)
    try:
        request = _CONVERTER.structure(payload, kind)
    except (ClassValidationError, InvalidRequestError) as error:
        raise InvalidRequestError(*islice(_list_issues(error, ()), MAX_ISSUES)) from None
    return request, tuple(dict.fromkeys(_find_unknown(payload, kind, "")))


def parse_json(body: bytes) -> Any:
    """Parse one JSON text, within the limits given at the top of this module.

    Raises:
        MalformedBodyError: not UTF-8, not JSON, or nested too deeply.
        InvalidRequestError: a number out of range or a key given twice.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedBodyError(f"the body is not UTF-8: byte {error.start} is wrong") from None
    _check_depth(text)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise MalformedBodyError(
            f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise MalformedBodyError(f"the body is nested more than {MAX_DEPTH} levels deep") from None
    return _replace_surrogates(value) if _ESCAPED_SURROGATE.search(text) else value


def describe_value(value: Any) -> str:
    """How a JSON value is named in an error: short, and never with what a container holds."""
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, Mapping):
        return "an object"
    text = json.dumps(value)
    return text if len(text) <= 48 else f"{text[:48]}…"


# Parsing


def _check_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if match[0] in "[{" else -1
        if depth > MAX_DEPTH:
            raise MalformedBodyError(f"the body is nested more than {MAX_DEPTH} levels deep")


def _parse_integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise InvalidRequestError(
            Issue((), f"wanted integers of at most {MAX_INTEGER_DIGITS} digits, got one of {len(text)}")
        )
    return int(text)


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise InvalidRequestError(Issue((), f"wanted finite numbers, got {text[:48]}"))
    return number


def _refuse_constant(text: str) -> Any:
    raise MalformedBodyError(f"the body is not JSON: {text} is no JSON number")


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidRequestError(Issue((), f"the key {describe_value(twice)} appears twice in one object"))
    return value


_DECODER = json.JSONDecoder(
    parse_int=_parse_integer,
    parse_float=_parse_float,
    parse_constant=_refuse_constant,
    object_pairs_hook=_build_object,
)


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_SURROGATE.sub("\ufffd", key): _replace_surrogates(item) for key, item in value.items()}
    return value


# Structuring


def _refuse_type(wanted: str, value: Any) -> InvalidRequestError:
    return InvalidRequestError(Issue((), f"wanted {wanted}, got {describe_value(value)}"))


def _structure_scalar(value: Any, kind: type) -> Any:
    # type() and not isinstance(): true is no integer.
    if type(value) not in _accepted_types(kind):
        raise _refuse_type(_name_kind(kind), value)
    return float(value) if kind is float else value


def _accepted_types(kind: Any) -> tuple[type, ...]:
    """Python types of the JSON values that ``kind`` can be made of."""
    if kind is float:
        return (float, int)
    if _is_tuple(kind):
        return (list,)
    if attrs.has(kind) or _is_mapping(kind):
        return (dict,)
    return (kind,)


def _name_kind(kind: Any) -> str:
    names = {str: "a string", bool: "true or false", int: "an integer", float: "a number", list: "a list"}
    return names.get(_accepted_types(kind)[0], "an object")


def _make_tuple_hook(converter: Converter, kind: Any) -> Hook:
    item_kind = GenericAlias(list, get_args(kind)[:1])
    structure_items = converter.get_structure_hook(item_kind)

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not list:
            raise _refuse_type("a list", value)
        return tuple(structure_items(value, item_kind))

    return structure


def _make_mapping_hook(converter: Converter, kind: Any) -> Hook:
    item_kind = GenericAlias(dict, get_args(kind))
    structure_items = converter.get_structure_hook(item_kind)

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            raise _refuse_type("an object", value)
        return structure_items(value, item_kind)

    return structure


def _make_union_hook(converter: Converter, kind: Any) -> Hook:
    members = [member for member in get_args(kind) if member is not NoneType]
    hooks = {
        accepted: (converter.get_structure_hook(member), member)
        for member in members
        for accepted in _accepted_types(member)
    }
    wanted = " or ".join(_name_kind(member) for member in members)

    def structure(value: Any, _: Any) -> Any:
        if value is None and NoneType in get_args(kind):
            return None
        found = hooks.get(type(value))
        if found is None:
            raise _refuse_type(wanted, value)
        hook, member = found
        return hook(value, member)

    return structure


def _make_class_hook(converter: Converter, kind: Any) -> Hook:
    structure_fields = make_dict_structure_fn(kind, converter, _cattrs_detailed_validation=True)
    optional = frozenset(field.name for field in attrs.fields(kind) if field.default is not attrs.NOTHING)
    sort = next((field for field in attrs.fields(kind) if field.name == "type"), None)

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            raise _refuse_type("an object", value)
        if sort is not None and sort.validator is not None and type(value.get("type")) is str:
            # What is of another type has other fields: to miss those of this one would mislead.
            sort.validator(None, sort, value["type"])
        given = {key: item for key, item in value.items() if item is not None or key not in optional}
        return structure_fields(given, kind)

    return structure


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) is Mapping


def _build_converter() -> Converter:
    converter = Converter(detailed_validation=True)
    for scalar in (str, bool, int, float):
        converter.register_structure_hook(scalar, _structure_scalar)
    for is_kind, make_hook in (
        (_is_union, _make_union_hook),
        (_is_tuple, _make_tuple_hook),
        (_is_mapping, _make_mapping_hook),
        (attrs.has, _make_class_hook),
    ):
        converter.register_structure_hook_factory(is_kind, partial(make_hook, converter))
    return converter


_CONVERTER = _build_converter()


def _list_issues(error: BaseException, path: tuple[str | int, ...]) -> Iterator[Issue]:
    """Flatten what cattrs raised, with the path to each leaf."""
    if isinstance(error, InvalidRequestError):
        for issue in error.issues:
            yield attrs.evolve(issue, path=path + issue.path)
    elif isinstance(error, ClassValidationError):
        with_names, others = error.group_exceptions()
        for inner, note in with_names:
            if isinstance(inner, KeyError):
                yield Issue((*path, note.name), "is required")
            else:
                yield from _list_issues(inner, (*path, note.name))
        for inner in others:
            yield from _list_issues(inner, path)
    elif isinstance(error, IterableValidationError):
        with_indices, others = error.group_exceptions()
        for inner, index_note in with_indices:
            yield from _list_issues(inner, (*path, index_note.index))
        for inner in others:
            yield from _list_issues(inner, path)
    else:
        # A fault of ours, not of the client.
        raise error


@cache
def _describe_class(kind: type[attrs.AttrsInstance]) -> tuple[frozenset[str], tuple[tuple[str, Any], ...]]:
    """Known keys of a class, and its fields that hold lists of, or one, nested class."""
    hints = get_type_hints(kind)
    known = frozenset(field.name for field in attrs.fields(kind)) | getattr(
        kind, "WITHOUT_EFFECT", frozenset()
    )
    nested = tuple(
        (field.name, inner) for field in attrs.fields(kind) for inner in _find_classes(hints[field.name])
    )
    return known, nested


def _find_classes(hint: Any) -> Iterator[Any]:
    if isinstance(hint, type) and attrs.has(hint):
        yield hint
    for inner in get_args(hint):
        yield from _find_classes(inner)


def _find_unknown(value: Any, kind: Any, prefix: str) -> Iterator[str]:
    known, nested = _describe_class(kind)
    for key in value:
        if key not in known:
            yield prefix + key
    for name, inner in nested:
        child = value.get(name)
        for item in child if isinstance(child, list) else (child,):
            if isinstance(item, dict):
                mark = "[]." if isinstance(child, list) else "."
                yield from _find_unknown(item, inner, f"{prefix}{name}{mark}")
