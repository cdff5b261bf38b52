"""Which parts of a schema have finite, writable values; the others are cut out.

The engine would walk into them: a schema that contains itself at a place that must be filled is a text
without an end, and after the name of a property without a legal value no token is legal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.limits import MAX_CHAIN, MAX_NESTING
from astrai_triton.grammar.literals import TYPES, type_of

_ALL = frozenset(TYPES)
_NONE: frozenset[str] = frozenset()
_MAX_ROUNDS = 64

_STRING_LEAF = ("pattern", "format", "minLength", "maxLength")
_NUMBER_LEAF = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

_LISTS = ("allOf", "anyOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
_SINGLES = ("additionalProperties", "items")


def settle_schema(schema: dict[str, Any], is_writable: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """``schema`` without the parts that no text can satisfy.

    Args:
        schema: in normal form, ``$defs`` at its root.
        is_writable: whether a schema of one string or number has a value that tokens can write.

    Raises:
        GrammarError: nothing is left, or schemas or brackets nest too deeply.
    """
    return _Settling(schema, is_writable).run()


class _Settling:
    def __init__(self, schema: dict[str, Any], is_writable: Callable[[dict[str, Any]], bool]) -> None:
        self._root = {key: value for key, value in schema.items() if key != "$defs"}
        self._definitions: dict[str, Any] = schema.get("$defs", {})
        self._is_writable = is_writable
        self._alive: dict[str, frozenset[str]] = dict.fromkeys(self._definitions, _NONE)

    def run(self) -> dict[str, Any]:
        self._check_chain(self._root, 0, set())
        self._check_loops()
        # References to what is defined later settle first.
        order = list(reversed(self._definitions))
        for _ in range(_MAX_ROUNDS):
            before = dict(self._alive)
            for name in order:
                self._alive[name] = self._types_alive(self._definitions[name])
            if self._alive == before:
                break
        else:
            raise GrammarError("the schema's references are too tangled; simplify them")
        root = self._prune(self._root)
        if not isinstance(root, dict):
            raise GrammarError("no JSON satisfies the schema: all that it allows has no value or never ends")
        definitions = {name: self._prune(node) for name, node in self._definitions.items()}
        settled = root | ({"$defs": definitions} if definitions else {})
        if _nesting(settled) > MAX_NESTING:
            raise GrammarError(f"the schema nests more than {MAX_NESTING} brackets; use $defs and $ref")
        return settled

    def _check_chain(self, node: Any, depth: int, seen: set[str]) -> None:
        """Follow references at first sight, as the engine does on the native stack."""
        if depth > MAX_CHAIN:
            raise GrammarError(
                f"the schema leads through more than {MAX_CHAIN} schemas, references followed; flatten it"
            )
        for part in _parts_of(node):
            self._check_chain(part, depth + 1, seen)
        name = _referenced(node)
        if name is not None and name not in seen:
            seen.add(name)
            self._check_chain(self._definitions[name], depth + 1, seen)

    def _check_loops(self) -> None:
        """Refuse a schema that is applied to the very value it was applied to already."""
        leads_to = {name: set(_applied_references(node)) for name, node in self._definitions.items()}
        while leads_to:
            ends = {name for name, others in leads_to.items() if not others & leads_to.keys()}
            if not ends:
                raise GrammarError(
                    "a $ref leads back to its own schema with nothing in between; it says nothing"
                )
            leads_to = {name: others for name, others in leads_to.items() if name not in ends}

    def _types_alive(self, node: Any) -> frozenset[str]:
        """Types of which ``node`` has finite values, as far as its own keywords and references tell."""
        if isinstance(node, bool):
            return _ALL if node else _NONE
        declared = {"number" if name == "integer" else name for name in node.get("type", TYPES)}
        alive = frozenset(kind for kind in declared if self._is_alive_as(kind, node))
        name = _referenced(node)
        if name is not None:
            alive &= self._alive[name]
        if "anyOf" in node:
            alive &= _NONE.union(*(self._types_alive(branch) for branch in node["anyOf"]))
        for part in node.get("allOf", ()):
            alive &= self._types_alive(part)
        if "const" in node:
            alive &= {type_of(node["const"])}
        if "enum" in node:
            alive &= {type_of(value) for value in node["enum"]}
        return alive

    def _is_alive_as(self, kind: str, node: Mapping[str, Any]) -> bool:
        if kind == "string":
            return self._has_leaf("string", _STRING_LEAF, "pattern", node)
        if kind == "number":
            return self._has_leaf(
                "integer" if _is_integer(node) else "number", _NUMBER_LEAF, "multipleOf", node
            )
        if kind == "array":
            prefix, least = node.get("prefixItems", []), node.get("minItems", 0)
            must = [*prefix[:least], *([node.get("items", True)] if least > len(prefix) else [])]
            return all(self._types_alive(part) for part in must)
        if kind == "object":
            required = node.get("required", ())
            if node.get("minProperties", 0) > len(required) and not self._has_optional(node):
                return False
            return all(self._types_alive(_property_of(node, name)) for name in required)
        return True

    def _has_leaf(self, kind: str, keywords: tuple[str, ...], deciding: str, node: Mapping[str, Any]) -> bool:
        if deciding not in node:
            return True
        return self._is_writable({"type": kind} | {key: node[key] for key in keywords if key in node})

    def _has_optional(self, node: Mapping[str, Any]) -> bool:
        required = node.get("required", ())
        listed = [part for name, part in node.get("properties", {}).items() if name not in required]
        others = [*node.get("patternProperties", {}).values(), node.get("additionalProperties", True)]
        return any(self._types_alive(part) for part in (*listed, *others))

    def _prune(self, node: Any) -> Any:
        if isinstance(node, bool):
            return node
        if not self._types_alive(node):
            return False
        pruned: dict[str, Any] = {}
        for key, value in node.items():
            if key in _LISTS:
                pruned[key] = [self._prune(part) for part in value]
            elif key in _MAPS:
                pruned[key] = {name: self._prune(part) for name, part in value.items()}
            elif key in _SINGLES:
                pruned[key] = self._prune(value)
            else:
                pruned[key] = value
        declared = node.get("type", TYPES)
        kept = [name for name in declared if self._is_alive_as("number" if name == "integer" else name, node)]
        if len(kept) < len(declared):
            # First, so that the engine knows the types before it reads anything else. Never because of what a
            # reference leads to: beside other keywords the engine resolves it at once, and never ends in a
            # cycle.
            pruned = {"type": kept} | {key: value for key, value in pruned.items() if key != "type"}
        return pruned


def _is_integer(node: Mapping[str, Any]) -> bool:
    return "integer" in node.get("type", ())


def _referenced(node: Any) -> str | None:
    reference = node.get("$ref") if isinstance(node, dict) else None
    return None if reference is None else reference.removeprefix("#/$defs/")


def _property_of(node: Mapping[str, Any], name: str) -> Any:
    properties = node.get("properties", {})
    if name in properties:
        return properties[name]
    # Which patterns match the name is for the engine to say.
    return True if "patternProperties" in node else node.get("additionalProperties", True)


def _applied_references(node: Any) -> Iterator[str]:
    """Definitions that are applied to the same value as ``node``."""
    name = _referenced(node)
    if name is not None:
        yield name
    if isinstance(node, dict):
        for part in (*node.get("allOf", ()), *node.get("anyOf", ())):
            yield from _applied_references(part)


def _parts_of(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for key in _LISTS:
            yield from node.get(key, ())
        for key in _MAPS:
            yield from node.get(key, {}).values()
        for key in _SINGLES:
            if key in node:
                yield node[key]


def _nesting(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_nesting, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_nesting, value), default=0)
    return 0
