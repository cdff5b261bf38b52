"""Keywords of numbers, and counts.

The engine computes with doubles and 64-bit integers, reads more than 15 digits of a fraction inexactly, and
says nothing when a value does not fit. Here it fits, is narrowed to a bound that does and allows no value
more, or is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

import attrs

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.limits import MAX_MULTIPLE

_FAR = 10**17
"""The engine cannot express that a number is beyond this."""
_WIDE = 9 * 10**18
"""No number that the engine compares with is beyond this."""
_DIGITS = 15
_DECIMALS = 18

_FORMATS: dict[str, tuple[int, int] | None] = {
    "float": None,
    "double": None,
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
"""Formats of OpenAPI: the least and greatest value."""


def is_number(value: object) -> bool:
    """Whether a JSON value is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_number_format(name: object) -> bool:
    """Whether a format speaks of numbers."""
    return isinstance(name, str) and name in _FORMATS


def read_count(schema: Mapping[str, Any], keyword: str, where: str) -> int | None:
    """The value of a keyword that counts, or ``None`` if the schema lacks it.

    Raises:
        GrammarError: not a whole number >= 0.
    """
    if keyword not in schema:
        return None
    value = schema[keyword]
    if not is_number(value) or not math.isfinite(value) or value < 0 or value != int(value):
        raise GrammarError(f"{where}/{keyword}: wanted a whole number >= 0, got {str(value)[:80]}")
    return min(int(value), 2**31)


def read_number_keywords(schema: Mapping[str, Any], *, is_integer: bool, where: str) -> dict[str, Any]:
    """One lower and one upper bound, and ``multipleOf``, in normal form. Values are compared as decimals.

    Args:
        schema: its keywords of numbers are read; a ``format`` only if it speaks of numbers.
        is_integer: no other numbers are valid.
        where: place in the document, for errors.

    Raises:
        GrammarError: malformed, contradictory, or beyond what can be expressed.
    """
    limits = _FORMATS[schema["format"]] if is_number_format(schema.get("format")) else None
    found: dict[str, Any] = {}
    tightest: list[_Bound] = []
    for keyword, exclusive, sign in (
        ("minimum", "exclusiveMinimum", 1),
        ("maximum", "exclusiveMaximum", -1),
    ):
        bounds = _read_bounds(schema, keyword, exclusive, where)
        bounds += [_Bound(limits[0 if sign > 0 else 1])] if limits else []
        if bounds:
            inside = [_move_inside(bound, sign, is_integer, f"{where}/{keyword}") for bound in bounds]
            bound = max(inside, key=lambda bound: (sign * bound.value, bound.is_open))
            found[exclusive if bound.is_open else keyword] = bound.value
            tightest.append(bound)
    if len(tightest) == 2:
        low, high = tightest
        if low.value > high.value or (low.value == high.value and (low.is_open or high.is_open)):
            raise GrammarError(f"{where}: no number is within the bounds that minimum and maximum set")
    if "multipleOf" in schema:
        found["multipleOf"] = _read_multiple(schema["multipleOf"], where)
    return found


@attrs.frozen
class _Bound:
    value: float
    is_open: bool = False
    """Whether the value itself is outside."""


def _read_bounds(schema: Mapping[str, Any], keyword: str, exclusive: str, where: str) -> list[_Bound]:
    # In draft 4 the exclusive keyword is a flag on the other one.
    flag = schema[exclusive] if isinstance(schema.get(exclusive), bool) else None
    if flag is not None and keyword not in schema:
        raise GrammarError(f"{where}/{exclusive}: a boolean needs {keyword!r} beside it; give a number")
    bounds = []
    for name, is_open in ((keyword, bool(flag)), (exclusive, True)):
        if name in schema and not (name == exclusive and flag is not None):
            value = schema[name]
            if not is_number(value) or not math.isfinite(value):
                raise GrammarError(f"{where}/{name}: wanted a number, got {str(value)[:80]}")
            bounds.append(_Bound(value, is_open))
    return bounds


def _move_inside(bound: _Bound, sign: int, is_integer: bool, where: str) -> _Bound:
    """The nearest bound that the engine can compare with; ``sign`` is 1 for a lower, -1 for an upper one."""
    value, is_open = bound.value, bound.is_open
    if is_integer:
        whole = math.ceil(value) if sign > 0 else math.floor(value)
        value, is_open = whole + sign if is_open and whole == value else whole, False
    if sign * value > _FAR:
        raise GrammarError(f"{where}: {value} is beyond what can be expressed; stay within +-{_FAR}")
    if sign * value < -_WIDE:
        return _Bound(-sign * _WIDE)
    if value == int(value):
        rounded = float(value)
        if sign * int(rounded) < sign * int(value):
            rounded = math.nextafter(rounded, sign * math.inf)
        return _Bound(int(rounded), is_open and int(rounded) == value)
    rounding = ROUND_CEILING if sign > 0 else ROUND_FLOOR
    number = Context(prec=_DIGITS, rounding=rounding).create_decimal(repr(value))
    if _num_decimals(number) > _DECIMALS:
        number = number.quantize(Decimal(1).scaleb(-_DECIMALS), rounding=rounding)
    return _Bound(float(number), is_open and float(number) == value)


def _num_decimals(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    return -exponent if isinstance(exponent, int) else 0


def is_exact(value: float) -> bool:
    """Whether the engine reads a number as the double that it is."""
    if isinstance(value, int):
        return abs(value) < 2**63 and int(float(value)) == value
    number = Decimal(repr(value)).normalize()
    return len(number.as_tuple().digits) <= _DIGITS and abs(_num_decimals(number)) <= _DECIMALS


def _read_multiple(value: Any, where: str) -> float:
    if not is_number(value) or not math.isfinite(value) or value <= 0:
        raise GrammarError(f"{where}/multipleOf: wanted a number > 0, got {str(value)[:80]}")
    coefficient, exponent = split_decimal(value)
    if coefficient > MAX_MULTIPLE or _engine_decimal(float(value)) != (coefficient, exponent):
        raise GrammarError(
            f"{where}/multipleOf: {value} has too many digits; at most {MAX_MULTIPLE} without the point"
        )
    return int(value) if value == int(value) else value


def split_decimal(value: float) -> tuple[int, int]:
    """``(coefficient, exponent)`` with ``value = coefficient / 10**exponent``, reduced; ``value`` > 0."""
    scaled, exponent = Decimal(repr(value)), 0
    while scaled != scaled.to_integral_value():
        scaled *= 10
        exponent += 1
    return int(scaled), exponent


def _engine_decimal(value: float) -> tuple[int, int]:
    # The engine multiplies a double by ten until nothing is left behind the point, and rounds on the way.
    exponent = 0
    while value != math.floor(value):
        value *= 10.0
        exponent += 1
    return int(value), exponent
