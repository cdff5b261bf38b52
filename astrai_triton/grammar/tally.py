"""What all strings and numbers of a schema cost the lexer together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.limits import MAX_COUNTED_CHARS, MAX_PATTERNS
from astrai_triton.grammar.numbers import split_decimal

_WORD = 2**32
"""The engine multiplies ``multipleOf``s in as many bits."""


class LeafTally:
    """Counts different string schemas and ``multipleOf``s; equal ones share a part of the lexer."""

    def __init__(self) -> None:
        self._patterns: set[str] = set()
        self._counted: dict[str, int] = {}
        self._multiples: set[tuple[int, int]] = set()

    def add_string(self, keywords: Mapping[str, Any], where: str) -> None:
        """Count the string keywords of one schema, in normal form."""
        if "pattern" in keywords or "format" in keywords:
            self._patterns.add(json.dumps([keywords.get("pattern"), keywords.get("format")]))
            if len(self._patterns) > MAX_PATTERNS:
                raise GrammarError(
                    f"{where}: the schema has more than {MAX_PATTERNS} different patterns and formats"
                )
        counted = max(keywords.get("minLength", 0), keywords.get("maxLength", 0))
        if counted:
            self._counted[json.dumps(keywords, sort_keys=True)] = counted
            if sum(self._counted.values()) > MAX_COUNTED_CHARS:
                raise GrammarError(
                    f"{where}: minLength and maxLength of different strings add up to more than "
                    f"{MAX_COUNTED_CHARS}; lower them or leave maxLength out"
                )

    def add_number(self, keywords: Mapping[str, Any], where: str) -> None:
        """Count the number keywords of one schema, in normal form."""
        if "multipleOf" not in keywords:
            return
        self._multiples.add(split_decimal(keywords["multipleOf"]))
        if len(self._multiples) > 1:
            most = max(exponent for _, exponent in self._multiples)
            scaled = [coefficient * 10 ** (most - exponent) for coefficient, exponent in self._multiples]
            if math.lcm(*scaled) * max(scaled) >= _WORD:
                raise GrammarError(
                    f"{where}/multipleOf: the values in this schema are too different to combine"
                )
