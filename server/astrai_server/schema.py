"""JSON Schemas of the request classes, made of their types, their checks and their docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs

from astrai_server.anthropic import ContentBlock
from astrai_server.debug import PrefixRequest
from astrai_server.field import MAX_TOOLS
from astrai_server.openai import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    ResponseFormat,
    SamplingRequest,
)
from astrai_server.tokenization import DetokenizeRequest, TokenizeRequest

Json = dict[str, Any]

_SCALARS: Mapping[Any, str] = MappingProxyType(
    {str: "string", bool: "boolean", int: "integer", float: "number", NoneType: "null"}
)


def refer(kind: str, name: str) -> Json:
    """A reference to a component of the document."""
    return {"$ref": f"#/components/{kind}/{name}"}


_TOKEN_ID: Json = {"type": "integer", "minimum": 0}

# What the checks of ``field`` mean, by name, given what each was made with.
_KEYWORDS: Mapping[str, Callable[..., Json]] = MappingProxyType(
    {
        "between": lambda low, high: {"minimum": low, "maximum": high},
        "at_least": lambda low: {"minimum": low},
        "not_empty": lambda: {"minItems": 1},
        "no_longer_than": lambda limit: {"maxLength": limit, "maxItems": limit},
        "stop_strings": lambda limit, max_chars: {
            "minLength": 1,
            "maxLength": max_chars,
            "maxItems": limit,
            "items": {"type": "string", "minLength": 1, "maxLength": max_chars},
        },
        "function_name": lambda: {"pattern": "^[a-zA-Z0-9_.:-]{1,128}$"},
        "distinct_tools": lambda: {"maxItems": MAX_TOOLS},
        "tool_choice": dict,
        "one_of": lambda known: {"enum": list(known)},
        "not_yet": lambda harmless, **_: {
            "enum": [None, *harmless],
            "description": "Not supported; only values that ask for nothing are accepted.",
        },
    }
)

# What a class checks in code of its own.
_BY_HAND: Mapping[tuple[type, str], Json] = MappingProxyType(
    {
        (ContentPart, "type"): {"enum": ["text", "refusal"]},
        (ContentPart, "text"): {"description": "Required where type is text."},
        (ContentBlock, "text"): {"description": "Required where type is text."},
        (ChatMessage, "content"): {"description": "Required unless role is assistant."},
        (ChatMessage, "tool_calls"): {"description": "Only where role is assistant."},
        (ChatCompletionRequest, "tool_choice"): {
            "description": "A word, or a function of `tools`; `required` needs `tools`.",
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                refer("schemas", "NamedToolChoice"),
                {"type": "null"},
            ],
        },
        (CompletionRequest, "prompt"): {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                {"type": "array", "minItems": 1, "items": _TOKEN_ID},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "array", "minItems": 1, "items": _TOKEN_ID},
                },
            ]
        },
        (ResponseFormat, "json_schema"): {"description": "Required where type is json_schema."},
        (SamplingRequest, "logit_bias"): {
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        (TokenizeRequest, "messages"): {"minItems": 1},
        (DetokenizeRequest, "tokens"): {"items": _TOKEN_ID},
        (PrefixRequest, "prompt"): {"description": "Either this or token_ids."},
    }
)

# Keywords that say nothing about values of other types.
_ONE_TYPE: Mapping[str, str] = MappingProxyType(
    {"minLength": "string", "maxLength": "string", "minItems": "array", "maxItems": "array", "items": "array"}
)


class SchemaBuilder:
    """Collects the schemas of request classes.

    Raises:
        TypeError: from ``body_of``, for a field of a kind or with a check of which nothing is known here.
    """

    def __init__(self) -> None:
        self.components: Json = {}
        """Schemas by name, each class once."""
        self._kinds: dict[str, type] = {}

    def body_of(self, kind: type[attrs.AttrsInstance]) -> Json:
        """A request body of class ``kind``."""
        return {"required": True, "content": {"application/json": {"schema": self._refer_to(kind)}}}

    def _refer_to(self, kind: type[attrs.AttrsInstance]) -> Json:
        if self._kinds.setdefault(kind.__name__, kind) is not kind:
            raise TypeError(f"kind: wanted classes of different names, got a second {kind.__name__}")
        if kind.__name__ not in self.components:
            self.components[kind.__name__] = self._describe_class(kind)
        return refer("schemas", kind.__name__)

    def _describe_class(self, kind: type[attrs.AttrsInstance]) -> Json:
        hints, docs = get_type_hints(kind), _read_docs(kind)
        properties: Json = {}
        required = []
        for field in attrs.fields(kind):
            keywords = _list_keywords(kind, field)
            schema = _apply(self._describe_kind(hints[field.name]), keywords)
            if field.name in docs:
                schema["description"] = docs[field.name]
            if field.default is attrs.NOTHING or "type" in keywords:
                required.append(field.name)
            else:
                schema = _make_optional(schema, field.default)
            properties[field.name] = schema
        for name in sorted(getattr(kind, "WITHOUT_EFFECT", ())):
            properties[name] = {"description": "Accepted, and changes nothing."}
        schema = {"type": "object", "description": _format(kind.__doc__ or ""), "properties": properties}
        return schema | ({"required": required} if required else {})

    def _describe_kind(self, kind: Any) -> Json:
        if kind is Any:
            return {}
        if kind in _SCALARS:
            return {"type": _SCALARS[kind]}
        if attrs.has(kind):
            return self._refer_to(kind)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is tuple:
            return {"type": "array", "items": self._describe_kind(arguments[0])}
        if origin is Mapping:
            return {"type": "object", "additionalProperties": self._describe_kind(arguments[1])}
        if origin in (Union, UnionType):
            return _unite([self._describe_kind(member) for member in arguments])
        raise TypeError(f"kind: wanted one that wire can read, got {kind}")


def _unite(schemas: list[Json]) -> Json:
    """One schema for a value of any of ``schemas``, whose types differ."""
    if any("type" not in schema for schema in schemas):
        return {"anyOf": schemas}
    united: Json = {}
    for schema in schemas:
        united |= schema
    return united | {"type": [schema["type"] for schema in schemas]}


def _list_keywords(kind: type, field: attrs.Attribute[Any]) -> Json:
    """What the checks of a field say about its values."""
    by_hand = next(
        (_BY_HAND[base, field.name] for base in kind.__mro__ if (base, field.name) in _BY_HAND), {}
    )
    check = field.validator
    if check is None:
        return dict(by_hand)
    name = getattr(check, "__qualname__", "").partition(".")[0]
    if name in _KEYWORDS:
        # The checks are closures over their limits.
        return _KEYWORDS[name](**inspect.getclosurevars(check).nonlocals) | by_hand
    if not by_hand:
        raise TypeError(f"{kind.__name__}.{field.name}: nothing is known here of its check {check!r}")
    return dict(by_hand)


def _apply(schema: Json, keywords: Json) -> Json:
    """Add those keywords that can apply to the types of ``schema``."""
    types = _list_types(schema)
    return schema | {
        key: value for key, value in keywords.items() if key not in _ONE_TYPE or _ONE_TYPE[key] in types
    }


def _list_types(schema: Json) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


def _make_optional(schema: Json, default: Any) -> Json:
    """Let the field be null, which is its default, and say what that is."""
    schema = dict(schema)
    if None not in schema.get("enum", (None,)):
        schema["enum"] = [*schema["enum"], None]
    if "type" in schema:
        types = _list_types(schema)
        schema["type"] = types if "null" in types else [*types, "null"]
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        default = default.factory()
    if default is not None:
        schema["default"] = list(default) if isinstance(default, tuple) else default
    return schema


def _read_docs(kind: type) -> dict[str, str]:
    """The docstrings that follow the fields of a class and its bases; none where there are no sources."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        docs |= _read_own_docs(base)
    return docs


def _read_own_docs(kind: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except OSError:
        return {}
    docs = {}
    body = [node for item in tree.body if isinstance(item, ast.ClassDef) for node in item.body]
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                docs[node.target.id] = _format(text.value)
    return docs


def _format(text: str) -> str:
    """A docstring as Markdown, and in the words of JSON."""
    return re.sub(r"\bNone\b", "null", inspect.cleandoc(text).replace("``", "`"))
