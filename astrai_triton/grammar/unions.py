"""A proof that no value matches two schemas, which turns ``oneOf`` into ``anyOf``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.literals import TYPES, identify, type_of

_MAX_STEPS = 100_000
_MAX_DEPTH = 6


class Disjointness:
    """Proves schemas in normal form disjoint, by their types, values, ranges and the properties they require.

    Args:
        definitions: what references lead to.
    """

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._steps = 0

    def check(self, branches: list[Any], where: str) -> None:
        """Raise unless any two of ``branches`` are disjoint.

        Raises:
            GrammarError: two may match the same value, or the proof is beyond reach.
        """
        for (i, a), (j, b) in combinations(enumerate(branches), 2):
            if not self._are_disjoint(a, b, _MAX_DEPTH):
                raise GrammarError(
                    f"{where}: a value may match both schema {i} and {j}, which a grammar cannot exclude"
                    "; use anyOf, or give them a required property whose const differs"
                )

    def _are_disjoint(self, a: Any, b: Any, depth: int) -> bool:
        self._steps += 1
        if self._steps > _MAX_STEPS or depth < 0:
            return False
        for one, other in ((a, b), (b, a)):
            if one is False:
                return True
            branches = one.get("anyOf") if isinstance(one, dict) else None
            if branches and all(self._are_disjoint(branch, other, depth - 1) for branch in branches):
                return True
        return any(
            self._are_apart(x, y, depth) for x in self._conjuncts(a, depth) for y in self._conjuncts(b, depth)
        )

    def _conjuncts(self, schema: Any, depth: int) -> Iterator[dict[str, Any]]:
        """Schemas that every value of ``schema`` matches, references followed."""
        if not isinstance(schema, dict):
            yield {}
            return
        yield schema
        if depth > 0:
            parts = list(schema.get("allOf", ()))
            if "$ref" in schema:
                parts.append(self._definitions[schema["$ref"].removeprefix("#/$defs/")])
            for part in parts:
                yield from self._conjuncts(part, depth - 1)

    def _are_apart(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        values_a, values_b = _values_of(a), _values_of(b)
        if values_a is not None and values_b is not None:
            return {identify(value) for value in values_a}.isdisjoint(identify(value) for value in values_b)
        return all(self._are_apart_as(kind, a, b, depth) for kind in _types_of(a) & _types_of(b))

    def _are_apart_as(self, kind: str, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        if kind == "number":
            return _begins_beyond(a, b) or _begins_beyond(b, a)
        if kind == "array":
            return _exceeds(a, b, "Items") or _exceeds(b, a, "Items")
        if kind == "string":
            return _exceeds(a, b, "Length") or _exceeds(b, a, "Length")
        if kind == "object":
            names = dict.fromkeys((*a.get("required", ()), *b.get("required", ())))
            return any(
                self._are_disjoint(_property_of(a, name), _property_of(b, name), depth - 1) for name in names
            )
        return False


def _values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    types = {"number" if name == "integer" else name for name in schema.get("type", TYPES)}
    values = _values_of(schema)
    return types if values is None else types & {type_of(value) for value in values}


def _property_of(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    # Which patterns match the name is for the engine to say.
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _exceeds(a: Mapping[str, Any], b: Mapping[str, Any], what: str) -> bool:
    limit = b.get(f"max{what}")
    return limit is not None and bool(a.get(f"min{what}", 0) > limit)


def _begins_beyond(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    low, high = a.get("minimum", a.get("exclusiveMinimum")), b.get("maximum", b.get("exclusiveMaximum"))
    if low is None or high is None:
        return False
    return bool(low > high or (low == high and ("minimum" not in a or "maximum" not in b)))
