from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.numbers import is_exact, read_number_keywords

Accepts = Callable[[Any, str], bool]


def read(schema: dict[str, Any], *, is_integer: bool = False) -> dict[str, Any]:
    return read_number_keywords(schema, is_integer=is_integer, where="schema")


@pytest.mark.parametrize(
    ("schema", "is_integer", "bounds"),
    [
        ({"minimum": 3, "maximum": 3}, False, {"minimum": 3, "maximum": 3}),
        ({"minimum": 5, "exclusiveMinimum": 5}, False, {"exclusiveMinimum": 5}),
        ({"minimum": 6, "exclusiveMinimum": 5}, False, {"minimum": 6}),
        ({"minimum": 5, "exclusiveMinimum": False}, False, {"minimum": 5}),
        ({"minimum": 2.5, "exclusiveMaximum": 4}, True, {"minimum": 3, "maximum": 3}),
        ({"format": "uint8", "minimum": 5}, True, {"minimum": 5, "maximum": 255}),
        ({"format": "double"}, False, {}),
        ({"minimum": 2**53 + 1}, True, {"minimum": 2**53 + 2}),
        ({"maximum": 2**53 + 1}, True, {"maximum": 2**53}),
        ({"minimum": -(10**30), "maximum": 10**30}, False, {"minimum": -9 * 10**18, "maximum": 9 * 10**18}),
        ({"maximum": 0.9999999999999999}, False, {"maximum": 0.999999999999999}),
        ({"exclusiveMinimum": 1e-30}, False, {"minimum": 1e-18}),
        ({"multipleOf": 2.0}, False, {"multipleOf": 2}),
    ],
)
def test_bounds_are_narrowed_to_what_the_engine_holds(
    schema: dict[str, Any], is_integer: bool, bounds: dict[str, Any]
) -> None:
    assert read(schema, is_integer=is_integer) == bounds


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"minimum": "1"}, "wanted a number"),
        ({"maximum": True}, "wanted a number"),
        ({"minimum": float("inf")}, "wanted a number"),
        ({"exclusiveMaximum": True}, "needs 'maximum' beside it"),
        ({"minimum": 2, "maximum": 1}, "no number is within"),
        ({"minimum": 1, "exclusiveMaximum": 1}, "no number is within"),
        ({"minimum": 10**18}, "beyond what can be expressed"),
        ({"maximum": -1e300}, "beyond what can be expressed"),
        ({"multipleOf": 0}, "wanted a number > 0"),
        ({"multipleOf": -1}, "wanted a number > 0"),
        ({"multipleOf": 12345.5}, "too many digits"),
        ({"multipleOf": 0.07}, "too many digits"),
    ],
)
def test_a_bound_is_refused_with_a_reason(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        read(schema)


def test_an_interval_without_integers_is_refused() -> None:
    with pytest.raises(GrammarError, match="no number is within"):
        read({"minimum": 1.2, "maximum": 1.8}, is_integer=True)


@given(st.floats(-1e15, 1e15), st.booleans(), st.booleans())
def test_a_narrowed_bound_lets_nothing_in(value: float, is_lower: bool, is_integer: bool) -> None:
    keyword = "minimum" if is_lower else "maximum"
    narrowed = Decimal(repr(read({keyword: value}, is_integer=is_integer)[keyword]))
    assert narrowed >= Decimal(repr(value)) if is_lower else narrowed <= Decimal(repr(value))
    assert is_exact(float(narrowed))


@given(st.integers(-2000, 2000), st.integers(0, 300), st.data())
def test_integers_within_bounds_are_written_and_no_others(
    accepts: Accepts, low: int, width: int, data: st.DataObject
) -> None:
    schema = {"type": "integer", "minimum": low, "maximum": low + width}
    value = data.draw(st.integers(low - 20, low + width + 20))
    assert accepts(schema, json.dumps(value)) == (low <= value <= low + width)


def test_multiples_that_would_overflow_together_are_refused(accepts: Accepts) -> None:
    schema = {"allOf": [{"type": "number", "multipleOf": 9973}, {"multipleOf": 0.0001}]}
    with pytest.raises(GrammarError, match="too different to combine"):
        accepts(schema, "1")
    assert accepts({"allOf": [{"type": "number", "multipleOf": 5}, {"multipleOf": 0.25}]}, "15")
