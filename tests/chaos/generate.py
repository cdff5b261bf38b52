"""Request bodies out of the OpenAPI document: what its schemas accept, what they refuse, and broken bytes."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs

Json = Any
Step = str | int

TEXTS = (
    "", "a", "hello", "text", "user", "0", "null", "\n", " ", "ü", "😀", "\u0000", "\u202e", "\ud800",
    "<assistant>", "<|im_end|>", "%s%n", "../../etc/passwd", "a" * 300, "{}", "[[", "\\", '"',
)  # fmt: skip
OPTIONAL_SHARE = 0.25
"""How many of the fields that may be left out are there."""
SHARES = {
    **dict.fromkeys(
        ("content", "text", "refusal", "id", "name", "input", "tool_use_id", "json_schema"), 0.95
    ),
    **dict.fromkeys(("tool_calls", "tool_choice", "best_of", "top_logprobs"), 0.1),
}
"""The same of fields for which there are rules that schemas do not tell."""
NULL_SHARE = 0.1
BRIEF_SHARE = 0.9
"""How many requests ask for few tokens, so that there is time for many requests."""


@attrs.frozen
class Place:
    """A value inside of a body, and what the document says of it."""

    path: tuple[Step, ...]
    schema: Json


class RequestGenerator:
    """Makes bodies for the operations of a document. Equal random states give equal bodies.

    Args:
        document: of OpenAPI 3.1.
    """

    def __init__(self, document: Json) -> None:
        self._schemas = document["components"]["schemas"]
        self.bodies: dict[str, Json] = {
            path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, operations in document["paths"].items()
            if "post" in operations
        }
        """Path -> schema of its body, for every operation that takes one."""

    def make_valid(self, rng: random.Random, path: str) -> Json:
        """A body that the document accepts."""
        body = self._make(rng, self.bodies[path])
        if "max_tokens" in self._resolve(self.bodies[path])["properties"] and rng.random() < BRIEF_SHARE:
            body["max_tokens"] = rng.randint(0, 16)
            body.pop("max_completion_tokens", None)
        return body

    def make_invalid(self, rng: random.Random, path: str) -> tuple[Json, str]:
        """A body that the document refuses, and the place for which it does."""
        while True:
            body = self.make_valid(rng, path)
            places = list(self._list_places(body, self.bodies[path], ()))
            place = rng.choice(places)
            wrong = self._list_wrong(place.schema, _look_up(body, place.path), rng)
            if wrong:
                return _replace(body, place.path, rng.choice(wrong)), "/".join(map(str, place.path)) or "body"

    def make_damaged(self, rng: random.Random, path: str) -> bytes:
        """The bytes of a body, some of them gone, doubled or different."""
        data = bytearray(json.dumps(self.make_valid(rng, path)).encode())
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(data) + 1)
            end = min(len(data), start + rng.randint(0, 8))
            data[start:end] = rng.choice(
                (b"", data[start:end] * 2, rng.randbytes(3), b'"', b"}", b"[", b"1e999")
            )
        return bytes(data)

    # Values that fit

    def _resolve(self, schema: Json) -> Json:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def _make(self, rng: random.Random, schema: Json) -> Json:
        schema = self._resolve(schema)
        if "anyOf" in schema:
            return self._make(rng, rng.choice(schema["anyOf"]))
        if "enum" in schema:
            return copy.deepcopy(rng.choice(schema["enum"]))
        types = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type")
        if types is None:
            return rng.choice([None, True, 7, "x", [], {}, {"a": [1]}])
        if types == ["null"] or ("null" in types and rng.random() < NULL_SHARE):
            return None
        return self._make_typed(rng, schema, rng.choice([kind for kind in types if kind != "null"]))

    def _make_typed(self, rng: random.Random, schema: Json, kind: str) -> Json:
        if kind == "string":
            low, high = schema.get("minLength", 0), schema.get("maxLength", 1 << 20)
            pattern = re.compile(schema.get("pattern", ""))
            return rng.choice([text for text in TEXTS if low <= len(text) <= high and pattern.search(text)])
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "integer":
            return _make_integer(rng, schema.get("minimum"), schema.get("maximum"))
        if kind == "number":
            low, high = schema["minimum"], schema["maximum"]
            return rng.choice([low, high, rng.uniform(low, high), round(rng.uniform(low, high), 1)])
        if kind == "array":
            count = rng.randint(schema.get("minItems", 0), 3)
            return [self._make(rng, schema["items"]) for _ in range(count)]
        if "properties" not in schema:
            return {
                str(rng.randint(0, 200)): self._make(rng, schema["additionalProperties"])
                for _ in range(rng.randint(0, 3))
            }
        return {
            name: self._make(rng, inner)
            for name, inner in schema["properties"].items()
            if name in schema.get("required", ()) or rng.random() < SHARES.get(name, OPTIONAL_SHARE)
        }

    # Values that do not

    def _list_places(self, value: Json, schema: Json, path: tuple[Step, ...]) -> Iterator[Place]:
        schema = self._resolve(schema)
        if "anyOf" in schema:
            # What one of them refuses as a whole another may accept; inside of it there is only one.
            for inner in schema["anyOf"]:
                if isinstance(value, dict) and "$ref" in inner:
                    yield from (
                        place for place in self._list_places(value, inner, path) if place.path != path
                    )
            return
        yield Place(path, schema)
        if isinstance(value, list) and "items" in schema:
            for i, item in enumerate(value):
                yield from self._list_places(item, schema["items"], (*path, i))
        elif isinstance(value, dict) and "enum" not in schema:
            properties = schema.get("properties", {})
            for key, item in value.items():
                inner = properties.get(key, schema.get("additionalProperties"))
                if inner is not None:
                    yield from self._list_places(item, inner, (*path, key))

    def _list_wrong(self, schema: Json, value: Json, rng: random.Random) -> list[Json]:
        """Values that ``schema`` refuses, near to ``value`` where possible."""
        wrong: list[Json] = []
        if "enum" in schema:
            strangers: list[Json] = ["no such value", 12345, [[]], {"type": "no such type"}]
            return [item for item in strangers if item not in schema["enum"]]
        types = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type")
        if types is None:
            return []
        wrong += [
            item
            for kind, item in _SAMPLES
            if kind not in types and not (kind == "integer" and "number" in types)
        ]
        for key, make in _BEYOND.items():
            if key in schema:
                wrong.append(make(schema[key]))
        if isinstance(value, dict):
            for name in schema.get("required", ()):
                wrong.append({key: item for key, item in value.items() if key != name})
            if "propertyNames" in schema:
                wrong.append(value | {rng.choice(["", "x", "-1", "01", "1.0", "²"]): 1})
        return wrong


_SAMPLES: tuple[tuple[str, Json], ...] = (
    ("string", "7"),
    ("boolean", True),
    ("integer", 1),
    ("number", 1.5),
    ("array", [[]]),
    ("object", {"a": 1}),
    ("null", None),
)
_BEYOND: dict[str, Callable[[Any], Json]] = {
    "minimum": lambda low: low - 1,
    "maximum": lambda high: high + 1,
    "maxLength": lambda limit: "x" * (limit + 1),
    "maxItems": lambda limit: ["x"] * (limit + 1),
    "minItems": lambda _: [],
    "minLength": lambda _: "",
}


def _make_integer(rng: random.Random, low: int | None, high: int | None) -> int:
    bottom = 0 if low is None else low
    top = bottom + 200 if high is None else high
    return rng.choice([bottom, top, rng.randint(bottom, min(top, bottom + 24)), rng.randint(bottom, top)])


def _look_up(value: Json, path: tuple[Step, ...]) -> Json:
    for step in path:
        value = value[step]
    return value


def _replace(value: Json, path: tuple[Step, ...], new: Json) -> Json:
    if not path:
        return new
    value = copy.deepcopy(value)
    _look_up(value, path[:-1])[path[-1]] = new
    return value
