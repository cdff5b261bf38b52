"""JSON Schema in a normal form that the grammar engine reads as it is meant.

The engine ignores words that it does not know, drops keywords under old dialects, and overflows the stack
on long reference chains. So the document is read here, keyword by keyword: each is understood, an annotation,
or an error. What comes out has

- only keywords of the engine, ``type`` a list, patterns in the engine's dialect, numbers that it can hold;
- every target of a reference under ``$defs``, by names of our own;
- ``oneOf`` only as ``anyOf``, after a proof that no value matches two of its schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.arrays import read_array_keywords
from astrai_triton.grammar.keywords import (
    APPLICATORS,
    CONSTRAINTS,
    CONTAINERS,
    DRAFTS,
    explain_unknown,
    is_annotation,
    is_vacuous,
)
from astrai_triton.grammar.limits import MAX_BRANCHES, MAX_DEPTH, MAX_SCHEMAS, MAX_VALUES
from astrai_triton.grammar.literals import TYPES, check_literal
from astrai_triton.grammar.numbers import is_number_format, read_number_keywords
from astrai_triton.grammar.objects import ObjectKeywords
from astrai_triton.grammar.references import References
from astrai_triton.grammar.strings import read_string_keywords
from astrai_triton.grammar.tally import LeafTally
from astrai_triton.grammar.unions import Disjointness

Node = bool | dict[str, Any]
"""A schema in normal form."""


def normalize_schema(schema: Any) -> dict[str, Any]:
    """The normal form of a document, ``$defs`` at its root.

    Args:
        schema: a parsed JSON Schema; the dialects from draft 4 to 2020-12 are read, differences included.

    Raises:
        GrammarError: malformed, unsupported, contradictory or too large; names the place and the keyword.
    """
    return _Reader(schema).read()


class _Reader:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._references = References(root)
        self._names: dict[str, str] = {}
        self._pending: list[tuple[str, str, Any]] = []
        self._definitions: dict[str, Node] = {}
        self._unions: list[tuple[str, list[Node]]] = []
        self._tally = LeafTally()
        self._num_schemas = 0
        self._num_values = 0
        self._applicators: dict[str, Callable[[Any, str, int], tuple[str, Any]]] = {
            "$ref": self._read_reference,
            "allOf": self._read_all,
            "anyOf": self._read_any,
            "oneOf": self._read_one,
            "const": self._read_const,
            "enum": self._read_enum,
        }

    def read(self) -> dict[str, Any]:
        node = self._read(self._root, "schema", 0)
        while self._pending:
            name, where, target = self._pending.pop()
            self._definitions[name] = self._read(target, where, 0)
        disjointness = Disjointness(self._definitions)
        for where, branches in self._unions:
            disjointness.check(branches, where)
        whole = dict(node) if isinstance(node, dict) else {} if node else {"allOf": [False]}
        return whole | ({"$defs": self._definitions} if self._definitions else {})

    def _read(self, schema: Any, where: str, depth: int) -> Node:
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise GrammarError(f"the schema has more than {MAX_SCHEMAS} parts; split it")
        if depth > MAX_DEPTH:
            raise GrammarError(
                f"{where}: more than {MAX_DEPTH} schemas inside of each other; use $defs and $ref"
            )
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(f"{where}: a schema is an object or a boolean, got {str(schema)[:80]!r}")
        if schema.get("not") is True or schema.get("not") == {}:
            return False
        parts: list[tuple[str, Any]] = []
        has_constraints = False
        for keyword, value in schema.items():
            if keyword in CONSTRAINTS:
                if not has_constraints:
                    has_constraints = True
                    parts += self._read_constraints(schema, where, depth).items()
            elif keyword in APPLICATORS:
                parts.append(self._applicators[keyword](value, f"{where}/{keyword}", depth))
            elif keyword in CONTAINERS:
                if not isinstance(value, dict):
                    raise GrammarError(f"{where}/{keyword}: wanted an object of schemas")
            elif keyword in ("$schema", "$id"):
                self._check_identity(keyword, value, where)
            elif not is_annotation(keyword) and not is_vacuous(keyword, schema):
                raise GrammarError(f"{where}: {explain_unknown(keyword)}")
        return _join(parts)

    def _check_identity(self, keyword: str, value: Any, where: str) -> None:
        if not isinstance(value, str):
            raise GrammarError(f"{where}/{keyword}: wanted a string")
        if keyword == "$schema" and not any(draft in value for draft in DRAFTS):
            raise GrammarError(f"{where}: unknown dialect {value[:200]!r}; use 2020-12, or leave $schema out")
        if keyword == "$id" and where != "schema":
            raise GrammarError(f"{where}: an $id below the root would change what $ref means; leave it out")

    def _read_constraints(self, schema: Mapping[str, Any], where: str, depth: int) -> dict[str, Any]:
        """All keywords but applicators, as far as they say something about the types that are allowed."""
        types = _read_types(schema, where)
        present = set(types or TYPES)
        found: dict[str, Any] = {} if types is None else {"type": list(types)}

        def read(part: Any, name: str) -> Node:
            return self._read(part, f"{where}/{name}", depth + 1)

        is_integer = "integer" in present
        numbers = read_number_keywords(schema, is_integer=is_integer, where=where)
        has_number_format = is_number_format(schema.get("format")) and not present.isdisjoint(
            ("number", "integer")
        )
        texts = {key: value for key, value in schema.items() if key != "format" or not has_number_format}
        strings = read_string_keywords(texts, where)
        arrays = read_array_keywords(schema, where, read)
        objects = ObjectKeywords(schema, where, read).read()
        if is_integer or "number" in present:
            found |= numbers
            self._tally.add_number(numbers, where)
        if "string" in present:
            found |= strings
            self._tally.add_string(strings, where)
        if "array" in present:
            found |= arrays
        if "object" in present:
            found |= objects
        return found

    def _read_reference(self, value: Any, where: str, depth: int) -> tuple[str, Any]:
        if not isinstance(value, str):
            raise GrammarError(f"{where}: wanted a string")
        pointer, target = self._references.resolve(value, where)
        if pointer not in self._names:
            self._names[pointer] = f"d{len(self._names)}"
            self._pending.append((self._names[pointer], f"schema{pointer[:200]}", target))
        return "$ref", f"#/$defs/{self._names[pointer]}"

    def _read_list(self, value: Any, where: str, depth: int) -> list[Node]:
        if not isinstance(value, list) or not value:
            raise GrammarError(f"{where}: wanted a list of at least one schema")
        if len(value) > MAX_BRANCHES:
            raise GrammarError(f"{where}: {len(value)} schemas; at most {MAX_BRANCHES} are taken")
        return [self._read(branch, f"{where}/{index}", depth + 1) for index, branch in enumerate(value)]

    def _read_all(self, value: Any, where: str, depth: int) -> tuple[str, Any]:
        return "allOf", self._read_list(value, where, depth)

    def _read_any(self, value: Any, where: str, depth: int) -> tuple[str, Any]:
        return "anyOf", self._read_list(value, where, depth)

    def _read_one(self, value: Any, where: str, depth: int) -> tuple[str, Any]:
        branches = self._read_list(value, where, depth)
        self._unions.append((where, branches))
        return "anyOf", branches

    def _read_const(self, value: Any, where: str, depth: int) -> tuple[str, Any]:
        self._count_values(check_literal(value, where))
        return "const", value

    def _read_enum(self, value: Any, where: str, depth: int) -> tuple[str, Any]:
        if not isinstance(value, list) or not value:
            raise GrammarError(f"{where}: wanted a list of at least one value")
        self._count_values(sum(check_literal(item, where) for item in value))
        return "enum", value

    def _count_values(self, count: int) -> None:
        self._num_values += count
        if self._num_values > MAX_VALUES:
            raise GrammarError(f"the schema lists more than {MAX_VALUES} values in enum and const")


def _read_types(schema: Mapping[str, Any], where: str) -> tuple[str, ...] | None:
    if "type" not in schema:
        return None
    value = schema["type"]
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in (*TYPES, "integer"):
            raise GrammarError(
                f"{where}/type: unknown type {str(name)[:80]!r}; there are integer, {', '.join(TYPES)}"
            )
    if not names:
        raise GrammarError(f"{where}/type: wanted at least one type")
    return tuple(dict.fromkeys(name for name in names if name != "integer" or "number" not in names))


def _join(parts: list[tuple[str, Any]]) -> dict[str, Any]:
    """One schema of several keywords; a second value of the same keyword goes under ``allOf``."""
    node: dict[str, Any] = {}
    for keyword, value in parts:
        if keyword == "allOf":
            node.setdefault("allOf", []).extend(value)
        elif keyword in node:
            node.setdefault("allOf", []).append({keyword: value})
        else:
            node[keyword] = value
    return node
