"""Quantities as people read them."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """A time with three digits and a unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        number = seconds * factor
        if number >= 1:
            return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def format_count(count: int) -> str:
    """A number with three digits and a decimal prefix."""
    number = float(count)
    for prefix in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} T"
