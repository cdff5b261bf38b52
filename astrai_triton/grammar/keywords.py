"""Which keywords of JSON Schema constrain a value here, which say nothing about it, which are refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "const", "enum"})

CONSTRAINTS = frozenset({
    "type", "properties", "patternProperties", "additionalProperties", "propertyNames", "required",
    "minProperties", "maxProperties", "prefixItems", "items", "additionalItems", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
})  # fmt: skip

CONTAINERS = frozenset({"$defs", "definitions"})
"""Hold schemas that mean something only where they are referenced."""

ANNOTATIONS = frozenset({
    "$anchor", "$comment", "$vocabulary", "id", "title", "description", "markdownDescription", "default",
    "example", "examples", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding",
    "contentSchema", "discriminator", "externalDocs", "xml", "enumNames", "enumDescriptions",
})  # fmt: skip

_REFUSED = {
    "uniqueItems": "a grammar cannot compare items; leave it out, or list the allowed arrays with enum",
    "contains": "a grammar cannot look for one item among others; constrain items instead",
    "minContains": "a grammar cannot look for one item among others; constrain items instead",
    "maxContains": "a grammar cannot look for one item among others; constrain items instead",
    "not": "a grammar cannot exclude values; say which are allowed",
    "if": "write the cases as anyOf",
    "then": "write the cases as anyOf",
    "else": "write the cases as anyOf",
    "dependentRequired": "write the cases as anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "dependencies": "write the cases as anyOf",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "nullable": 'add "null" to type',
    "$dynamicRef": "use $ref",
    "$dynamicAnchor": "use $anchor or $defs",
    "$recursiveRef": "use $ref",
    "$recursiveAnchor": "use $ref",
    "x-guidance": "options of the grammar engine are not for schemas",
}
_KNOWN = sorted(APPLICATORS | CONSTRAINTS | CONTAINERS | ANNOTATIONS | _REFUSED.keys())

DRAFTS = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")


def is_annotation(keyword: str) -> bool:
    """Whether a keyword says nothing about which values are valid."""
    return keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance")


def explain_unknown(keyword: str) -> str:
    """Why a keyword that is neither constraint nor annotation is refused, and what to do instead."""
    if keyword in _REFUSED:
        return f"{keyword!r} is not supported; {_REFUSED[keyword]}"
    near = difflib.get_close_matches(keyword[:40], _KNOWN, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown keyword {keyword[:80]!r}; {hint}annotations of your own begin with 'x-'"


def is_vacuous(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Whether a keyword that is otherwise refused allows every value in this schema."""
    value = schema[keyword]
    if keyword in ("nullable", "uniqueItems", "not") and value is False:
        return True
    if keyword == "uniqueItems" and schema.get("maxItems") in (0, 1):
        return value is True
    if keyword in ("unevaluatedProperties", "unevaluatedItems"):
        return value is True
    if keyword == "if":
        return "then" not in schema and "else" not in schema
    if keyword in ("then", "else"):
        return "if" not in schema
    if keyword in ("minContains", "maxContains"):
        return "contains" not in schema
    return False
