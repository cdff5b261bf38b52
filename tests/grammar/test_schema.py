from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_triton.errors import GrammarError
from astrai_triton.grammar import Grammar
from astrai_triton.grammar.compiler import GrammarCompiler
from astrai_triton.grammar.keywords import APPLICATORS, CONSTRAINTS, CONTAINERS
from astrai_triton.grammar.schema import normalize_schema

Accepts = Callable[[Any, str], bool]

WORDS = sorted(
    APPLICATORS | CONSTRAINTS | CONTAINERS | {"not", "if", "$id", "$schema", "uniqueItems", "title"}
)

REFUSED: tuple[tuple[Any, str], ...] = (
    ([], "a schema is an object or a boolean"),
    ({"properties": {"a": 1}}, "schema/properties/a: a schema is an object or a boolean"),
    ({"type": "text"}, "schema/type: unknown type 'text'"),
    ({"type": []}, "at least one type"),
    ({"type": ["string", None]}, "unknown type 'None'"),
    ({"maxlength": 3}, "did you mean 'maxLength'"),
    ({"frobnicate": 3}, "unknown keyword 'frobnicate'"),
    ({"x-guidance": {"lenient": True}}, "options of the grammar engine are not for schemas"),
    ({"items": {"x-guidance": {}}}, "schema/items: 'x-guidance' is not supported"),
    ({"uniqueItems": True}, "'uniqueItems' is not supported"),
    ({"contains": {}}, "'contains' is not supported"),
    ({"not": {"type": "null"}}, "'not' is not supported"),
    ({"if": {}, "then": {}}, "'if' is not supported"),
    ({"dependentRequired": {}}, "write the cases as anyOf"),
    ({"dependencies": {}}, "write the cases as anyOf"),
    ({"unevaluatedProperties": False}, "use additionalProperties"),
    ({"nullable": True}, 'add "null" to type'),
    ({"$dynamicRef": "#a"}, "use \\$ref"),
    ({"$schema": "https://example.com/mine"}, "unknown dialect"),
    ({"$schema": 3}, "schema/\\$schema: wanted a string"),
    ({"$defs": []}, "wanted an object of schemas"),
    ({"properties": {"a": {"$id": "b"}}}, "an \\$id below the root"),
    ({"$ref": 3}, "schema/\\$ref: wanted a string"),
    ({"$ref": "#/$defs/a"}, "points at nothing"),
    ({"$ref": "other.json"}, "leads to another document"),
    ({"$ref": "#a"}, "the \\$anchor of no place"),
    ({"$ref": "#a", "$defs": {"b": {"$anchor": "a"}, "c": {"$anchor": "a"}}}, "of 2 places"),
    ({"allOf": []}, "at least one schema"),
    ({"anyOf": {}}, "at least one schema"),
    ({"enum": []}, "at least one value"),
    ({"enum": "abc"}, "at least one value"),
    ({"const": 2**53 + 1}, "more digits than are kept exactly"),
    ({"enum": [0.1 + 0.2]}, "more digits than are kept exactly"),
    ({"const": json.loads("[" * 300 + "]" * 300)}, "nests more than 100 brackets"),
    ({"const": "a\u0000"}, r"control character U\+0000"),
    ({"const": {"\x7f": 1}}, r"control character U\+007F"),
    ({"properties": {"\x1b": {}}}, r"control character U\+001B"),
    ({"const": "\ud800"}, "lone surrogate"),
    ({"minLength": -1}, "whole number >= 0"),
    ({"maxLength": 1.5}, "whole number >= 0"),
    ({"maxItems": True}, "whole number >= 0"),
    ({"minLength": 3, "maxLength": 2}, "minLength 3 is above maxLength 2"),
    ({"minItems": 3, "maxItems": 2}, "minItems 3 is above maxItems 2"),
    ({"pattern": 1}, "schema/pattern: wanted a string"),
    ({"format": "base64"}, "format 'base64' is not supported; there are date,"),
    ({"format": "unknown"}, "format 'unknown' is not supported"),
    ({"type": "string", "format": "int32"}, "format 'int32' is not supported"),
    ({"prefixItems": {}}, "list of schemas"),
    ({"items": [{}], "prefixItems": [{}]}, "a list beside prefixItems"),
    ({"properties": []}, "object of schemas"),
    ({"patternProperties": []}, "object of schemas"),
    ({"required": "a"}, "list of property names"),
    ({"required": [1]}, "list of property names"),
    ({"required": ["a", "b"], "maxProperties": 1}, "maxProperties 1 is below"),
    ({"minProperties": 2}, "one property beyond those in required, not for 2"),
    ({"propertyNames": {"type": "integer"}}, "property names are strings"),
    ({"propertyNames": {"minLength": 2}}, "only enum or const are supported"),
    ({"propertyNames": {"enum": ["a"]}, "required": ["b"]}, "'b' is not among the allowed names"),
    ({"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}}, "join the patterns"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "both schema 0 and 1"),
)


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_a_schema_is_refused_with_its_place_and_reason(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        normalize_schema(schema)


VACUOUS: tuple[dict[str, Any], ...] = (
    {"uniqueItems": False},
    {"type": "array", "maxItems": 1, "uniqueItems": True},
    {"nullable": False},
    {"not": False},
    {"unevaluatedProperties": True},
    {"if": {"type": "string"}},
    {"then": {"type": "string"}},
    {"minContains": 1},
    {"additionalItems": False},
    {"title": "t", "description": "d", "default": 3, "examples": [1], "deprecated": True, "readOnly": True},
    {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.com/x", "$comment": "c"},
    {"x-order": 3, "x-enum-varnames": ["a"]},
    {"propertyNames": {"type": "string"}},
    {"discriminator": {"propertyName": "kind"}},
)


@pytest.mark.parametrize("schema", VACUOUS)
def test_a_keyword_that_says_nothing_changes_nothing(schema: dict[str, Any]) -> None:
    kept = {key: schema[key] for key in ("type", "maxItems") if key in schema}
    if isinstance(kept.get("type"), str):
        kept["type"] = [kept["type"]]
    assert normalize_schema(schema) == kept


# Schema, texts that it allows, texts that it forbids.
MEANINGS: tuple[tuple[Any, tuple[str, ...], tuple[str, ...]], ...] = (
    (True, ("1", '"x"', '{"a":[null]}'), ("", "[1", "tru")),
    ({"type": ["integer", "number"]}, ("1.5", "1"), ('"1"',)),
    ({"type": "integer", "format": "int8"}, ("127", "-128"), ("128", "-129")),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, ("1.5", "2"), ("1", "0.5")),
    ({"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 4}, ("2", "3"), ("1", "4")),
    ({"type": "number", "exclusiveMaximum": 1, "minimum": 0}, ("0.99", "0"), ("1", "1.0")),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ("123", "-5"), ("9" * 20,)),
    ({"type": "number", "maximum": 0.9999999999999999}, ("0.5",), ("1", "1.0")),
    ({"type": "integer", "multipleOf": 3, "maximum": 10}, ("9", "-3", "0"), ("10", "12", "4")),
    ({"type": "string", "maxLength": 2}, ('"é😀"', '"\\n\\""'), ('"abc"', '"\\u0061"')),
    (
        {"type": "string", "format": "date"},
        ('"2024-02-29"',),
        ('"2023-02-29"', '"1900-02-29"', '"0000-01-01"'),
    ),
    (
        {"type": "string", "format": "time"},
        ('"23:59:59.5Z"', '"00:00:00+01:00"'),
        ('"24:00:00Z"', '"23:59:60Z"'),
    ),
    ({"type": "string", "format": "date", "pattern": "^2"}, ('"2000-01-01"',), ('"1999-01-01"', '"2"')),
    (
        {"items": [{"type": "null"}], "additionalItems": {"type": "integer"}, "type": "array"},
        ("[null,1]", "[]"),
        ("[1]", "[null,null]"),
    ),
    (
        {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
        ("[]", "[null]"),
        ("[null,null]",),
    ),
    (
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ('{"a":1,"b":"x"}', "3"),
        ('{"b":1}', '{"a":1,"\\u0061":"x"}'),
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
        ('{"b":null}',),
        ('{"c":null}', '{"a":1}'),
    ),
    ({"type": "object", "propertyNames": {"pattern": "^k"}}, ('{"k1":1}', "{}"), ('{"x":1}',)),
    (
        {"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}},
        ('{"a":null}',),
        ("{}",),
    ),
    (
        {"patternProperties": {"^a": {"type": "null"}}, "properties": {"ab": {}}, "type": "object"},
        ('{"ab":null}',),
        ('{"ab":1}',),
    ),
    (
        {"additionalProperties": False, "anyOf": [{"type": "object"}], "patternProperties": {"^a": {}}},
        ('{"a":1}',),
        ('{"b":1}',),
    ),
    ({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"const": 1}}}, ("1",), ("2",)),
    ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "const": 1}}}, ("1",), ("2",)),
    (
        {"$id": "https://a.b/c", "$ref": "https://a.b/c#/$defs/x", "$defs": {"x": {"const": 1}}},
        ("1",),
        ("2",),
    ),
    ({"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {"type": "integer"}}}, ("5",), ("6",)),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}, ("5",), ("6",)),
    ({"anyOf": [{"type": "null"}], "oneOf": [{"type": "null"}, {"type": "integer"}]}, ("null",), ("1",)),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"}, ('"ab"', '"ba"'), ('"a"',)),
    ({"anyOf": [{"not": {}}, {"const": 1}]}, ("1",), ("2",)),
    (
        {
            "type": "object",
            "properties": {"$ref": {"type": "string"}, "x-guidance": {}, "allOf": {"type": "null"}},
        },
        ('{"$ref":"a","x-guidance":1,"allOf":null}',),
        ('{"$ref":1}', '{"allOf":1}'),
    ),
    ({"const": {"$ref": "#/nope", "$id": "a"}}, ('{"$ref":"#/nope","$id":"a"}',), ("1",)),
    (
        {"type": "object", "patternProperties": {"^a*?b": {"type": "integer"}, "^a*b": {"maximum": 5}}},
        ('{"ab":5}',),
        ('{"ab":6}', '{"ab":"x"}'),
    ),
    ({"enum": [1, "a", {"k": [None]}]}, ("1", '"a"', '{"k": [null]}'), ("2", '{"k":[]}')),
)


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), MEANINGS)
def test_a_schema_means_what_json_schema_says(
    accepts: Accepts, schema: Any, allowed: tuple[str, ...], forbidden: tuple[str, ...]
) -> None:
    assert [text for text in allowed if not accepts(schema, text)] == []
    assert [text for text in forbidden if accepts(schema, text)] == []


def test_white_space_is_bounded_and_as_models_write_it(accepts: Accepts) -> None:
    schema = {"type": "object"}
    for text in (
        '{"a": 1, "b": [1, 2]}',
        '{"a":1,"b":[1,2]}',
        '{ "a": 1 }',
        '{\n  "a": 1,\n  "b": [\n    1,\n    2\n  ]\n}',
        '{\n\t"a": {\n\t\t"b": 1\n\t}\n}',
    ):
        assert accepts(schema, text), text
    for text in (
        '{"a":  1}',
        '{\n\n"a": 1}',
        '{"a": 1} ',
        ' {"a": 1}',
        '{"a":\r\n1}',
        '{"a": 1\n' + " " * 33 + "}",
    ):
        assert not accepts(schema, text), text


@pytest.mark.parametrize(
    ("branches", "is_proven"),
    [
        ([{"type": "string"}, {"type": "null"}], True),
        ([{"const": 1}, {"const": True}], True),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"enum": ["a", "b"]}, {"enum": ["b"]}], False),
        ([{"type": "integer", "maximum": 4}, {"type": "number", "minimum": 5}], True),
        ([{"type": "number", "maximum": 5}, {"type": "number", "minimum": 5}], False),
        ([{"type": "number", "exclusiveMaximum": 5}, {"type": "number", "minimum": 5}], True),
        ([{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}], True),
        ([{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}], True),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/c"}], False),
        (
            [{"allOf": [{"$ref": "#/$defs/a"}, {}]}, {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}],
            True,
        ),
        ([{"type": "object", "required": ["x"]}, {"type": "object", "additionalProperties": False}], True),
        ([{"properties": {"k": {"const": 1}}}, {"properties": {"k": {"const": 2}}}], False),
        ([{}, {"type": "string"}], False),
        ([{}, False], True),
    ],
)
def test_one_of_is_taken_only_with_a_proof(branches: list[Any], is_proven: bool) -> None:
    def tagged(kind: int, **others: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {"k": {"const": kind}, **others}, "required": ["k"]}

    definitions = {"a": tagged(1), "b": tagged(2), "c": tagged(1, x={"type": "null"})}
    schema = {"oneOf": branches, "$defs": definitions}
    if is_proven:
        assert "anyOf" in normalize_schema(schema)
    else:
        with pytest.raises(GrammarError, match="oneOf"):
            normalize_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "string", "pattern": "^a$", "maxLength": 0},
        {"type": "string", "pattern": "^\\x01$"},
        {"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 13},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "object", "required": ["a"], "properties": {"a": {"type": "string", "pattern": "^\\x7f$"}}},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"const": 1, "type": "string"},
        {"type": "object", "minProperties": 1, "additionalProperties": False},
    ],
)
def test_a_schema_without_any_text_is_refused(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(GrammarError, match=r"no JSON satisfies|never ends"):
        compiler.compile(Grammar.json_schema(schema))


def test_a_schema_applied_to_itself_is_refused(compiler: GrammarCompiler) -> None:
    for schema in ({"$ref": "#"}, {"anyOf": [{"type": "null"}, {"$ref": "#"}]}):
        with pytest.raises(GrammarError, match="nothing in between"):
            compiler.compile(Grammar.json_schema(schema))


@pytest.mark.parametrize(
    ("schema", "text", "dead_end"),
    [
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/x"}},
                "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1}},
            },
            "{}",
            '{"a"',
        ),
        (
            {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"k": {"type": "string", "pattern": "^\\x01$"}},
                        "required": ["k"],
                    },
                    {"type": "null"},
                ]
            },
            "null",
            "{",
        ),
        ({"type": ["array", "null"], "items": {"type": "string", "pattern": "^\\x01$"}}, "[]", '["'),
        ({"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1}, "[null]", "[]"),
    ],
)
def test_parts_without_a_text_are_cut_out(
    accepts: Accepts, compiler: GrammarCompiler, schema: Any, text: str, dead_end: str
) -> None:
    assert accepts(schema, text)
    matcher = compiler.compile(Grammar.json_schema(schema)).start()
    *way, end = dead_end.encode()
    for byte in way:
        matcher.accept(byte)
    with pytest.raises(GrammarError, match="not legal"):
        matcher.accept(end)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3)),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), parts, max_size=4)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(WORDS), JSON, max_size=5))
def test_whatever_stands_under_a_keyword_is_taken_or_refused(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    refusal = ""
    try:
        compiler.compile(Grammar("json_schema", json.dumps(schema)))
    except GrammarError as error:
        refusal = str(error)
    assert len(refusal) < 1000
