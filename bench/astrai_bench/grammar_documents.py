"""Schemas as clients send them, and documents as models write them."""

from __future__ import annotations

from typing import Any

LIST = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
}
TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "City and country"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["location", "unit"],
    "additionalProperties": False,
}
PYDANTIC = {
    "$defs": {
        "Address": {
            "properties": {
                "street": {"title": "Street", "type": "string"},
                "zip": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Zip"},
            },
            "required": ["street"],
            "title": "Address",
            "type": "object",
        },
        "Role": {"enum": ["admin", "user"], "title": "Role", "type": "string"},
    },
    "properties": {
        "name": {"maxLength": 20, "minLength": 1, "title": "Name", "type": "string"},
        "age": {"exclusiveMinimum": 0, "title": "Age", "type": "integer"},
        "role": {"$ref": "#/$defs/Role", "default": "user", "description": "What it may do"},
        "addresses": {"items": {"$ref": "#/$defs/Address"}, "title": "Addresses", "type": "array"},
    },
    "required": ["name", "age", "addresses"],
    "title": "Person",
    "type": "object",
}
UNION = {
    "$defs": {
        "Cat": {
            "properties": {"kind": {"const": "cat", "type": "string"}, "lives": {"type": "integer"}},
            "required": ["kind", "lives"],
            "type": "object",
        },
        "Dog": {
            "properties": {"kind": {"const": "dog", "type": "string"}, "barks": {"type": "boolean"}},
            "required": ["kind", "barks"],
            "type": "object",
        },
    },
    "discriminator": {
        "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
        "propertyName": "kind",
    },
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
}
ZOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        "pair": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "string"}], "items": False},
        "extra": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "number"},
        },
    },
    "required": ["id", "tags"],
    "additionalProperties": False,
}

DOCUMENTS: tuple[tuple[str, Any, Any], ...] = (
    ("tool call", WEATHER, {"location": "São Paulo, Brazil", "unit": "celsius", "days": 5}),
    (
        "person",
        PYDANTIC,
        {
            "name": "Ada Lovelace",
            "age": 36,
            "role": "admin",
            "addresses": [
                {"street": "12 St James's Square", "zip": "SW1Y"},
                {"street": "Ockham Park", "zip": None},
            ],
        },
    ),
    ("list", LIST, {"value": 1, "next": {"value": 22, "next": {"value": 333, "next": None}}}),
    (
        "tree",
        TREE,
        {
            "name": "root",
            "children": [
                {"name": "left", "children": []},
                {"name": "right", "children": [{"name": "a leaf"}]},
            ],
        },
    ),
    (
        "any object",
        {"type": "object"},
        {
            "summary": "The quick brown fox jumps over the lazy dog, twice.",
            "scores": [0.25, 12, -3e-5],
            "ok": True,
            "more": {"nothing": None},
        },
    ),
)
"""Name, schema and a value whose JSON text is walked token by token."""
