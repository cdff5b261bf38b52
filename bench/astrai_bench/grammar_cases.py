"""Schemas with values that are valid and values that are not."""

from __future__ import annotations

from typing import Any

import attrs

from astrai_bench.grammar_documents import LIST, PYDANTIC, TREE, UNION, WEATHER, ZOD


@attrs.frozen
class SchemaCase:
    """One way of using JSON Schema.

    Args:
        name: keyword, or where the schema is from.
        schema: a JSON Schema.
        valid: values that it allows, properties in the order of the schema; none: it has to be refused.
        invalid: values that it forbids.
        invalid_texts: JSON texts that violate it once a reader has joined equal names.
    """

    name: str
    schema: Any
    valid: tuple[Any, ...] = ()
    invalid: tuple[Any, ...] = ()
    invalid_texts: tuple[str, ...] = ()


_UUID = "123e4567-e89b-12d3-a456-426614174000"

CASES: tuple[SchemaCase, ...] = (
    SchemaCase("type string", {"type": "string"}, ("", 'a\n"é😀'), (1, None)),
    SchemaCase("type integer", {"type": "integer"}, (0, -12, 123456789), (1.5, "1", True)),
    SchemaCase("type number", {"type": "number"}, (0, -1.25, 1e-7), ("1", None)),
    SchemaCase("type boolean", {"type": "boolean"}, (True, False), (0, "true")),
    SchemaCase("type null", {"type": "null"}, (None,), (0, "null")),
    SchemaCase("type list", {"type": ["string", "null"]}, ("x", None), (1, [])),
    SchemaCase("empty schema", {}, (1, "a", None, [1, {"a": []}], {"b": True})),
    SchemaCase("true", True, (1, {"a": [None]})),
    SchemaCase("any object", {"type": "object"}, ({}, {"a": 1, "b": [True]}), ([], 1)),
    SchemaCase("any array", {"type": "array"}, ([], [1, "a", [None]]), ({}, "x")),
    SchemaCase("enum", {"enum": ["a", 1, None, True]}, ("a", 1, None, True), ("b", 2, False)),
    SchemaCase("enum of objects", {"enum": [{"a": 1}, [1, 2]]}, ({"a": 1}, [1, 2]), ({"a": 2}, [1])),
    SchemaCase("const", {"const": "fixed"}, ("fixed",), ("other", 1)),
    SchemaCase("const of a large integer", {"const": 2**53 + 1}, (2**53 + 1,), (2**53,)),
    SchemaCase("minLength", {"type": "string", "minLength": 2}, ("ab", "abc"), ("", "a")),
    SchemaCase("maxLength", {"type": "string", "maxLength": 2}, ("", "é😀"), ("abc",)),
    SchemaCase("pattern", {"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}, ("AB-1",), ("ab-1", "AB-")),
    SchemaCase("pattern, unanchored", {"type": "string", "pattern": "b+c"}, ("abbcd", "bc"), ("bd", "")),
    SchemaCase("pattern, class in a class", {"type": "string", "pattern": "^[[a]$"}, ("[", "a"), ("b",)),
    SchemaCase("pattern, double ampersand", {"type": "string", "pattern": "^[a&&b]$"}, ("a", "&"), ("c",)),
    SchemaCase("pattern, look-ahead", {"type": "string", "pattern": "^(?!x).+$"}, ("ab",), ("xa",)),
    SchemaCase("pattern and length", {"type": "string", "pattern": "^a*$", "minLength": 2}, ("aa",), ("a",)),
    SchemaCase("format date", {"type": "string", "format": "date"}, ("2024-02-29",), ("2024-13-01", "x")),
    SchemaCase(
        "format date, leap years",
        {"format": "date", "type": "string"},
        ("2000-02-29",),
        ("2023-02-29", "1900-02-29"),
    ),
    SchemaCase(
        "format date-time", {"type": "string", "format": "date-time"}, ("2024-01-02T03:04:05Z",), ("2024",)
    ),
    SchemaCase("format email", {"type": "string", "format": "email"}, ("a.b@example.com",), ("a.b", "@")),
    SchemaCase("format uuid", {"type": "string", "format": "uuid"}, (_UUID,), ("123",)),
    SchemaCase("format ipv4", {"type": "string", "format": "ipv4"}, ("10.0.0.255",), ("10.0.0.256",)),
    SchemaCase("format uri", {"type": "string", "format": "uri"}, ("https://a.b/c?d=1#e",), ("not a uri",)),
    SchemaCase("format int32", {"type": "integer", "format": "int32"}, (2**31 - 1,), (2**31,)),
    SchemaCase("format unknown", {"type": "string", "format": "unknown"}, (), ()),
    SchemaCase("minimum and maximum", {"type": "integer", "minimum": 3, "maximum": 17}, (3, 9, 17), (2, 18)),
    SchemaCase(
        "exclusive bounds", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, (0.5,), (0, 1)
    ),
    SchemaCase(
        "bounds of int64", {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, (5, -7), ("5",)
    ),
    SchemaCase("a bound of 16 digits", {"type": "number", "maximum": 0.9999999999999999}, (0.5,), (1,)),
    SchemaCase("multipleOf", {"type": "integer", "multipleOf": 7}, (0, 14, -21), (1, 15)),
    SchemaCase("multipleOf 0.01", {"type": "number", "multipleOf": 0.01}, (1, 2.5, 9.99), (0.001,)),
    SchemaCase("items", {"type": "array", "items": {"type": "integer"}}, ([], [1, 2]), (["a"], [1, None])),
    SchemaCase(
        "minItems and maxItems",
        {"type": "array", "minItems": 1, "maxItems": 2},
        ([1], [1, 2]),
        ([], [1, 2, 3]),
    ),
    SchemaCase(
        "prefixItems",
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        ([], ["a"], ["a", 1]),
        ([1], ["a", 1, 2]),
    ),
    SchemaCase(
        "items as a list (draft 7)",
        {"type": "array", "items": [{"type": "string"}], "additionalItems": {"type": "integer"}},
        (["a", 1, 2],),
        ([1], ["a", "b"]),
    ),
    SchemaCase(
        "nested arrays",
        {"type": "array", "items": {"type": "array", "items": {"type": "null"}}},
        ([[None], []],),
        ([1],),
    ),
    SchemaCase("uniqueItems", {"type": "array", "uniqueItems": True}, ([1, 2],), ([1, 1],)),
    SchemaCase("contains", {"type": "array", "contains": {"const": 1}}, ([2, 1],), ([2],)),
    SchemaCase(
        "properties",
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        ({}, {"a": 1}),
        ({"a": "x"},),
    ),
    SchemaCase(
        "properties without type", {"properties": {"a": {"type": "integer"}}}, ({"a": 1}, "x"), ({"a": "x"},)
    ),
    SchemaCase(
        "required",
        {"type": "object", "properties": {"a": True}, "required": ["a"]},
        ({"a": []},),
        ({}, {"b": 1}),
    ),
    SchemaCase(
        "additionalProperties false",
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        ({}, {"a": 1}),
        ({"b": 1}, {"a": 1, "b": 2}),
    ),
    SchemaCase(
        "additionalProperties",
        {"type": "object", "additionalProperties": {"type": "integer"}},
        ({"x": 1},),
        ({"x": "y"},),
    ),
    SchemaCase(
        "patternProperties",
        {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
        ({"x_a": 1},),
        ({"x_a": "s"}, {"y": 1}),
    ),
    SchemaCase(
        "propertyNames enum",
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
        ({"a": 1},),
        ({"c": 1},),
    ),
    SchemaCase(
        "propertyNames pattern",
        {"type": "object", "propertyNames": {"pattern": "^k"}},
        ({"k1": 1},),
        ({"x": 1},),
    ),
    SchemaCase("minProperties", {"type": "object", "minProperties": 1}, ({"a": 1},), ({},)),
    SchemaCase("maxProperties", {"type": "object", "maxProperties": 1}, ({}, {"a": 1}), ({"a": 1, "b": 2},)),
    SchemaCase(
        "dependentRequired",
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        ({"b": 1},),
        ({"a": 1},),
    ),
    SchemaCase(
        "unevaluatedProperties",
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        ({"a": 1},),
        ({"b": 1},),
    ),
    SchemaCase(
        "anyOf", {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, (1, "a"), ("ab", None)
    ),
    SchemaCase("oneOf of types", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, (1, "a"), (None,)),
    SchemaCase(
        "oneOf that overlaps",
        {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]},
        (4, 5.5),
        (6,),
    ),
    SchemaCase(
        "oneOf by a discriminator",
        UNION,
        ({"kind": "cat", "lives": 9}, {"kind": "dog", "barks": True}),
        ({"kind": "cat"},),
    ),
    SchemaCase("allOf", {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 5}]}, (1, 5), (0, 6, "x")),
    SchemaCase(
        "allOf of objects",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"type": "string"}}, "required": ["b"]},
            ]
        },
        ({"a": 1, "b": "x"},),
        ({"a": 1}, {"a": "x", "b": "x"}),
    ),
    SchemaCase("not", {"type": "string", "not": {"const": "x"}}, ("y",), ("x",)),
    SchemaCase(
        "if, then", {"type": "integer", "if": {"minimum": 10}, "then": {"multipleOf": 10}}, (3, 20), (11,)
    ),
    SchemaCase("nullable of OpenAPI", {"type": "string", "nullable": True}, ("x", None), (1,)),
    SchemaCase("$ref and $defs", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, (1,), ("x",)),
    SchemaCase(
        "$ref with siblings",
        {"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {"type": "integer"}}},
        (5,),
        (6, "x"),
    ),
    SchemaCase(
        "$ref with an escaped name",
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"const": 1}}},
        (1,),
        (2,),
    ),
    SchemaCase(
        "$ref by $anchor", {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "const": 1}}}, (1,), (2,)
    ),
    SchemaCase("$ref to nothing", {"$ref": "#/$defs/missing"}, (), (1, "x")),
    SchemaCase("recursive list", LIST, ({"value": 1, "next": {"value": 2, "next": None}},), ({"value": 1},)),
    SchemaCase("recursive tree", TREE, ({"name": "a", "children": [{"name": "b"}]},), ({"children": []},)),
    SchemaCase("recursion without end", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}, (), ([],)),
    SchemaCase(
        "annotations",
        {"type": "integer", "title": "t", "description": "d", "default": 1, "examples": [1]},
        (1,),
        ("x",),
    ),
    SchemaCase(
        "draft 4",
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 1,
            "exclusiveMinimum": True,
        },
        (2,),
        (1,),
    ),
    SchemaCase(
        "const under draft 4", {"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}, (5,), (6,)
    ),
    SchemaCase("misspelt keyword", {"type": "string", "maxlength": 2}, ("ab",), ("abc",)),
    SchemaCase(
        "a name spelt in two ways",
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ({"a": 1, "b": "x"},),
        ({"b": 1},),
        ('{"a": 1, "\\u0061": "x"}',),
    ),
    SchemaCase(
        "a name that counts twice",
        {"type": "object", "minProperties": 2},
        ({"a": 1, "b": 2},),
        ({"a": 1},),
        ('{"a": 1, "a": 2}',),
    ),
    SchemaCase("unsatisfiable", {"type": "string", "pattern": "^a+$", "maxLength": 0}, (), ("", "a")),
    SchemaCase(
        "tool of OpenAI",
        WEATHER,
        ({"location": "Paris", "unit": "celsius", "days": 3},),
        ({"location": "Paris"}, {"location": "x", "unit": "kelvin"}),
    ),
    SchemaCase(
        "model of pydantic",
        PYDANTIC,
        ({"name": "A", "age": 3, "role": "user", "addresses": [{"street": "s", "zip": None}]},),
        ({"name": "", "age": 3, "addresses": []}, {"name": "A", "age": 0, "addresses": []}),
    ),
    SchemaCase(
        "schema of zod",
        ZOD,
        ({"id": _UUID, "tags": ["a"], "pair": [1.5, "x"], "extra": {"k": 2}},),
        ({"id": "1", "tags": ["a"]}, {"id": _UUID, "tags": []}),
    ),
)
