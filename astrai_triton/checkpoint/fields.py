"""Typed reading of a checkpoint's key-value metadata, with errors that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import attrs

from astrai_triton.errors import CorruptFileError


@attrs.frozen
class Required:
    """Type of the marker for a key that has no default."""


REQUIRED: Final = Required()


@attrs.frozen
class Fields:
    """A mapping read with type checks; an absent or null key gives the default.

    Args:
        values: what the file holds.
        source: file, and section where there is one; opens every error text.
        prefix: put before every key, e.g. ``"llama."``.

    Every getter raises ``CorruptFileError`` for a key that is required and absent, or whose value has the
    wrong type or range.
    """

    values: Mapping[str, Any]
    source: str
    prefix: str = ""

    def has(self, key: str) -> bool:
        """True if the key is there and not null."""
        return self.values.get(self.prefix + key) is not None

    def integer(
        self, key: str, default: int | Required = REQUIRED, *, at_least: int = 1, at_most: int = 2**31 - 1
    ) -> int:
        """An integer in ``at_least..at_most``."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise self._wrong(key, f"an integer in {at_least}..{at_most}", value)
        return value

    def number(self, key: str, default: float | Required = REQUIRED, *, above: float = -math.inf) -> float:
        """A finite number greater than ``above``."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, "a number", value)
        if not math.isfinite(value) or value <= above:
            raise self._wrong(key, f"a finite number > {above:g}", value)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None when absent."""
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool | Required = REQUIRED) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | Required = REQUIRED) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def sequence(self, key: str) -> list[Any] | None:
        """A list, or None when absent."""
        value = self.values.get(self.prefix + key)
        if value is not None and not isinstance(value, (list, tuple)):
            raise self._wrong(key, "a list", value)
        return None if value is None else list(value)

    def section(self, key: str) -> Fields | None:
        """A nested mapping as fields of its own, or None when absent."""
        value = self.values.get(self.prefix + key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object", value)
        return Fields(value, f"{self.source}: {self.prefix}{key}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(self.prefix + key)
        if value is not None:
            return value
        if isinstance(default, Required):
            raise CorruptFileError(
                f"{self.source}: the required key {self.prefix + key!r} is missing; "
                "fetch the checkpoint again or convert it with a current tool"
            )
        return default

    def _wrong(self, key: str, wanted: str, got: object) -> CorruptFileError:
        return CorruptFileError(f"{self.source}: key {self.prefix + key!r}: wanted {wanted}, got {got!r}")
