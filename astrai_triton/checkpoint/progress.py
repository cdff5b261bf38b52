"""How long work reports how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the phase, what is done and what there is to do, in bytes; a total of 0 means unknown."""


def ignore(phase: str, done: int, total: int) -> None:
    """A ``Progress`` for callers that do not want to know."""
