"""What one option may hold: its type and range, how text becomes it, how it is named in an error."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from typing import Any

import attrs

from astrai_server.source import describe_value, read_scalar


@attrs.frozen(kw_only=True)
class Kind(ABC):
    """The values one option takes. Types are exact: a bool is no integer, ``"8000"`` is no number."""

    nullable: bool = False

    @property
    @abstractmethod
    def noun(self) -> str:
        """The values without null, for an error after "wanted" and for documentation."""

    @abstractmethod
    def holds(self, value: Any) -> bool:
        """Whether a value that is not None is one of the kind."""

    @property
    def wanted(self) -> str:
        """The values, null included."""
        return f"{self.noun} or null" if self.nullable else self.noun

    def check(self, value: Any) -> str | None:
        """Say what is wrong with a value as "wanted ..., got ...", or None if nothing is."""
        if (value is None and self.nullable) or (value is not None and self.holds(value)):
            return None
        return f"wanted {self.wanted}, got {describe_value(value)}{self._way_out(value)}"

    def parse(self, text: str) -> Any:
        """Read a value from an environment variable or a flag, as YAML; the result is not checked yet.

        Raises:
            ConfigError: the text is not YAML.
        """
        return read_scalar(text)

    def _way_out(self, value: Any) -> str:
        """Advice that ends the error, or nothing."""
        return ""

    def _parse_text(self, text: str) -> str | None:
        # Names and paths are taken as they are: a model called "1e5" or "no" is text here.
        return None if self.nullable and text in ("", "null", "~") else text


@attrs.frozen(kw_only=True)
class Integer(Kind):
    """A whole number in a closed range."""

    low: int
    high: int = 2**62

    @property
    def noun(self) -> str:
        if self.high == 2**62:
            return f"an integer of at least {self.low}"
        return f"an integer from {self.low} to {self.high}"

    def holds(self, value: Any) -> bool:
        return type(value) is int and self.low <= value <= self.high

    def _way_out(self, value: Any) -> str:
        return "; remove the quotes" if isinstance(value, str) and value.isdecimal() else ""


@attrs.frozen(kw_only=True)
class Number(Kind):
    """A number in a closed range; whole numbers count."""

    low: float
    high: float = 1e9

    @property
    def noun(self) -> str:
        return f"a number from {self.low:g} to {self.high:.0f}"

    def holds(self, value: Any) -> bool:
        return type(value) in (int, float) and self.low <= value <= self.high

    def _way_out(self, value: Any) -> str:
        if not isinstance(value, str):
            return ""
        try:
            is_number = math.isfinite(float(value))
        except ValueError:
            return ""
        return "; remove the quotes, and write a decimal point before an exponent" if is_number else ""


@attrs.frozen(kw_only=True)
class Flag(Kind):
    """true or false."""

    @property
    def noun(self) -> str:
        return "true or false"

    def holds(self, value: Any) -> bool:
        return type(value) is bool


@attrs.frozen(kw_only=True)
class Text(Kind):
    """Text that matches a pattern."""

    form: str = "text"
    pattern: str = r"[^\x00-\x1f\x7f]+"

    @property
    def noun(self) -> str:
        return self.form

    def holds(self, value: Any) -> bool:
        return type(value) is str and re.fullmatch(self.pattern, value) is not None

    def parse(self, text: str) -> Any:
        return self._parse_text(text)

    def _way_out(self, value: Any) -> str:
        return "; put it in quotes" if isinstance(value, (bool, int, float)) else ""


@attrs.frozen(kw_only=True)
class Choice(Kind):
    """One of a few values."""

    values: tuple[str | int, ...]

    @property
    def noun(self) -> str:
        *first, last = (str(value) for value in self.values)
        return f"{', '.join(first)} or {last}"

    def holds(self, value: Any) -> bool:
        return any(type(value) is type(choice) and value == choice for choice in self.values)

    def parse(self, text: str) -> Any:
        by_text = {str(value): value for value in self.values}
        return by_text.get(text, self._parse_text(text))


@attrs.frozen(kw_only=True)
class TextList(Kind):
    """A list of text; a tuple in the settings."""

    form: str = "a list of text"

    @property
    def noun(self) -> str:
        return self.form

    def holds(self, value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(type(item) is str and item for item in value)
