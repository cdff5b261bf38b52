"""Keywords of objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.limits import MAX_PROPERTIES
from astrai_triton.grammar.literals import check_text
from astrai_triton.grammar.numbers import read_count
from astrai_triton.grammar.patterns import translate_pattern

_ANNOTATED = frozenset({"title", "description", "type"})


class ObjectKeywords:
    """Reads the keywords of objects of one schema.

    Args:
        schema: its keywords of objects are read.
        where: place in the document, for errors.
        read: gives the normal form of a schema; the second argument is its place below ``where``.
    """

    def __init__(self, schema: Mapping[str, Any], where: str, read: Callable[[Any, str], Any]) -> None:
        self._schema = schema
        self._where = where
        self._read_part = read

    def read(self) -> dict[str, Any]:
        """Properties and their count in normal form, ``propertyNames`` resolved.

        Raises:
            GrammarError: malformed, contradictory, too large, or beyond a grammar.
        """
        schema = self._schema
        found: dict[str, Any] = {}
        if "properties" in schema:
            found["properties"] = self._read_properties()
        if "patternProperties" in schema:
            found["patternProperties"] = self._read_pattern_properties()
        if "additionalProperties" in schema:
            found["additionalProperties"] = self._read_part(
                schema["additionalProperties"], "additionalProperties"
            )
        if "required" in schema:
            found["required"] = self._read_required()
        for keyword in ("minProperties", "maxProperties"):
            count = read_count(schema, keyword, self._where)
            if count is not None:
                found[keyword] = count
        self._check_counts(found)
        if "propertyNames" in schema:
            self._restrict_names(schema["propertyNames"], found)
        return found

    def _read_properties(self) -> dict[str, Any]:
        properties = self._schema["properties"]
        if not isinstance(properties, dict):
            raise GrammarError(f"{self._where}/properties: wanted an object of schemas")
        if len(properties) > MAX_PROPERTIES:
            raise GrammarError(
                f"{self._where}/properties: {len(properties)} properties; at most {MAX_PROPERTIES} are taken"
            )
        for name in properties:
            check_text(name, f"{self._where}/properties")
        return {name: self._read_part(part, f"properties/{name[:60]}") for name, part in properties.items()}

    def _read_pattern_properties(self) -> dict[str, Any]:
        patterns = self._schema["patternProperties"]
        if not isinstance(patterns, dict):
            raise GrammarError(f"{self._where}/patternProperties: wanted an object of schemas")
        found: dict[str, Any] = {}
        for pattern, part in patterns.items():
            translated = translate_pattern(pattern, f"{self._where}/patternProperties")
            node = self._read_part(part, f"patternProperties/{pattern[:60]}")
            # Different spellings of one pattern are one pattern.
            found[translated] = {"allOf": [found[translated], node]} if translated in found else node
        return found

    def _read_required(self) -> list[str]:
        required = self._schema["required"]
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise GrammarError(f"{self._where}/required: wanted a list of property names")
        for name in required:
            check_text(name, f"{self._where}/required")
        return list(dict.fromkeys(required))

    def _check_counts(self, found: Mapping[str, Any]) -> None:
        least, most = found.get("minProperties", 0), found.get("maxProperties")
        num_required = len(found.get("required", ()))
        if most is not None and max(least, num_required) > most:
            raise GrammarError(
                f"{self._where}: maxProperties {most} is below what minProperties and required want"
            )
        if least > num_required + 1:
            # The names of further properties may repeat in the text, and then count once.
            raise GrammarError(
                f"{self._where}/minProperties: a grammar can ask for one property beyond those in required, "
                f"not for {least - num_required}; name them in required"
            )

    def _restrict_names(self, names: Any, found: dict[str, Any]) -> None:
        where = f"{self._where}/propertyNames"
        if names is True or (isinstance(names, dict) and names.keys() <= _ANNOTATED):
            if isinstance(names, dict) and names.get("type", "string") != "string":
                raise GrammarError(f"{where}: property names are strings")
            return
        keywords = (
            {key: names[key] for key in names if key not in _ANNOTATED} if isinstance(names, dict) else {}
        )
        if "patternProperties" in found:
            raise GrammarError(f"{where}: not supported beside patternProperties; join the patterns")
        others = found.get("additionalProperties", True)
        allowed = keywords.get("enum", [keywords["const"]] if "const" in keywords else None)
        if (
            len(keywords) == 1
            and isinstance(allowed, list)
            and all(isinstance(name, str) for name in allowed)
        ):
            found["properties"] = self._pick_properties(allowed, found, others, where)
        elif (
            len(keywords) == 1
            and "pattern" in keywords
            and not found.get("properties")
            and not found.get("required")
        ):
            if not isinstance(keywords["pattern"], str):
                raise GrammarError(f"{where}/pattern: wanted a string")
            found["patternProperties"] = {translate_pattern(keywords["pattern"], f"{where}/pattern"): others}
        else:
            raise GrammarError(
                f"{where}: only enum or const are supported, or pattern where no property is named; use "
                "patternProperties with additionalProperties: false"
            )
        found["additionalProperties"] = False

    def _pick_properties(
        self, allowed: list[str], found: Mapping[str, Any], others: Any, where: str
    ) -> dict[str, Any]:
        listed = found.get("properties", {})
        missing = [name for name in found.get("required", ()) if name not in allowed]
        if missing:
            raise GrammarError(
                f"{where}: the required property {missing[0][:80]!r} is not among the allowed names"
            )
        if len(allowed) > MAX_PROPERTIES:
            raise GrammarError(f"{where}: {len(allowed)} names; at most {MAX_PROPERTIES} are taken")
        for name in allowed:
            check_text(name, where)
        return {name: listed.get(name, others) for name in dict.fromkeys(allowed)}
