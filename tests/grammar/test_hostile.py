"""What a hostile schema may cost: bounded time, bounded memory, and never the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from astrai_triton.errors import GrammarError
from astrai_triton.grammar import Grammar
from astrai_triton.grammar.compiler import GrammarCompiler, GrammarMatcher
from astrai_triton.grammar.limits import (
    MAX_BRANCHES,
    MAX_CHAIN,
    MAX_COUNTED_CHARS,
    MAX_DEPTH,
    MAX_MIN_ITEMS,
    MAX_PATTERNS,
    MAX_PROPERTIES,
    MAX_SCHEMAS,
    MAX_VALUES,
)

Legal = Callable[[GrammarMatcher], list[int]]
SECONDS = 5.0
"""CPU time that one grammar may take; what was measured is below half a second."""


def chain(length: int) -> dict[str, Any]:
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "null"}}}


def nest(depth: int, wrap: Callable[[Any], Any]) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


def wide_object(count: int, prefix: str = "p") -> dict[str, Any]:
    return {"type": "object", "properties": {f"{prefix}{i}": {"type": "string"} for i in range(count)}}


def combine(num_factors: int, num_choices: int) -> dict[str, Any]:
    return {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"p{i}": {"const": j}}} for j in range(num_choices)]}
            for i in range(num_factors)
        ]
    }


REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("references in a row", chain(MAX_CHAIN), "leads through more than"),
    ("schemas in schemas", nest(MAX_DEPTH + 1, lambda part: {"items": part}), "inside of each other"),
    ("brackets", {"const": nest(120, lambda part: [part])}, "nests more than"),
    (
        "schemas",
        {"type": "object", "properties": {f"g{j}": wide_object(80) for j in range(60)}},
        f"more than {MAX_SCHEMAS} parts",
    ),
    ("properties", wide_object(MAX_PROPERTIES + 1), f"at most {MAX_PROPERTIES}"),
    ("branches", {"anyOf": [{"const": i} for i in range(MAX_BRANCHES + 1)]}, f"at most {MAX_BRANCHES}"),
    ("values", {"enum": list(range(MAX_VALUES + 1))}, f"more than {MAX_VALUES} values"),
    ("values in one", {"const": [0] * (MAX_VALUES + 1)}, f"more than {MAX_VALUES} values"),
    ("patterns", {"anyOf": [{"pattern": f"x{i}"} for i in range(MAX_PATTERNS + 1)]}, "different patterns"),
    ("characters", {"maxLength": MAX_COUNTED_CHARS + 1}, "add up to more than"),
    (
        "characters together",
        {"items": {"maxLength": MAX_COUNTED_CHARS // 2}, "maxLength": MAX_COUNTED_CHARS // 2 + 1},
        "add up to more than",
    ),
    ("items at least", {"minItems": MAX_MIN_ITEMS + 1}, "cannot be answered"),
    ("multiples", {"type": "integer", "multipleOf": 99_991}, "too many digits"),
    ("combinations", combine(5, 30), "too complex"),
    (
        "a pattern against a length",
        {"type": "string", "pattern": "^(a|b)*a(a|b){500}$", "minLength": 20, "maxLength": 200},
        "too complex",
    ),
)

TAKEN: tuple[tuple[str, Any], ...] = (
    ("references in a row", chain(MAX_CHAIN // 2 - 2)),
    ("schemas in schemas", nest(MAX_DEPTH, lambda part: {"type": "array", "items": part})),
    ("properties", wide_object(MAX_PROPERTIES)),
    (
        "wide objects",
        {"type": "object", "properties": {f"g{j}": wide_object(MAX_PROPERTIES, f"p{j}_") for j in range(8)}},
    ),
    ("branches", {"anyOf": [wide_object(10, f"p{i}_") for i in range(MAX_BRANCHES)]}),
    (
        "discriminated branches",
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(100)
            ]
        },
    ),
    ("values", {"enum": list(range(MAX_VALUES))}),
    ("characters", {"type": "string", "minLength": 3, "maxLength": MAX_COUNTED_CHARS}),
    ("items at least", {"type": "array", "minItems": MAX_MIN_ITEMS}),
    ("items at most", {"type": "array", "maxItems": 10**12}),
    ("repetitions of repetitions", {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}),
    (
        "many costly patterns",
        {
            "anyOf": [
                {"type": "string", "pattern": f"^(.{{0,{i + 100}}}x){{0,1000}}$"} for i in range(MAX_PATTERNS)
            ]
        },
    ),
    (
        "intersections of references",
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                **{
                    f"d{i}": {"allOf": 2 * [{"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}]}
                    for i in range(15)
                },
                "d15": {},
            },
        },
    ),
)


@pytest.mark.parametrize(("schema", "reason"), [pytest.param(*case, id=name) for name, *case in REFUSED])
def test_a_schema_beyond_the_limits_is_refused(compiler: GrammarCompiler, schema: Any, reason: str) -> None:
    begin = time.process_time()
    with pytest.raises(GrammarError, match=reason):
        compiler.compile(Grammar.json_schema(schema))
    assert time.process_time() - begin < SECONDS


@pytest.mark.parametrize("schema", [pytest.param(schema, id=name) for name, schema in TAKEN])
def test_a_schema_at_the_limits_is_compiled_in_bounded_time(
    compiler: GrammarCompiler, legal: Legal, schema: Any
) -> None:
    begin = time.process_time()
    answer = compiler.compile(Grammar.json_schema(schema)).start()
    for _ in range(20):
        if answer.is_complete:
            break
        answer.accept(legal(answer)[-1])
    assert time.process_time() - begin < SECONDS


def test_a_schema_of_the_greatest_length_is_read_in_bounded_time(compiler: GrammarCompiler) -> None:
    begin = time.process_time()
    compiler.compile(Grammar.json_schema({"description": "x" * 260_000}))
    assert time.process_time() - begin < SECONDS
