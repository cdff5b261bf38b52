"""Schemas that cost a grammar engine time, memory or the process."""

from __future__ import annotations

from typing import Any


def _chain(length: int) -> Any:
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "null"}}}


def _combinations(num_factors: int, num_choices: int) -> Any:
    return {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"p{i}": {"const": j}}} for j in range(num_choices)]}
            for i in range(num_factors)
        ]
    }


HOSTILE: tuple[tuple[str, Any], ...] = (
    ("2 000 references in a row", _chain(2_000)),
    ("10 000 values", {"enum": [f"value number {i}" for i in range(10_000)]}),
    (
        "10 000 properties",
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}},
    ),
    ("a million items at least", {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}),
    ("a million characters at most", {"type": "string", "maxLength": 1_000_000}),
    ("a repetition of repetitions", {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}),
    (
        "three searches 20 characters apart",
        {"type": "string", "pattern": "(.*a.{20}|.*b.{20}|.*c.{20})", "minLength": 20},
    ),
    ("30 choices to the power of 5", _combinations(5, 30)),
)
