"""What a bench refuses, in one line."""

from __future__ import annotations


class BenchError(Exception):
    """A bench cannot do what it was asked to; the text names the argument, what was wanted and what came."""
