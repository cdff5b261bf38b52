"""The grammar engine's error texts in words that a client understands."""

from __future__ import annotations

import re

_PLACE = re.compile(r"^at (\d+)\(\d+\): ")
_PREFIX = re.compile(r'^(?:failed to compile JSON schema|failed to parse "%json"|Parser Error|lexer error): ')
_UNSATISFIABLE = re.compile(r"^Unsatisfiable schema: ")
_LISTING = re.compile(r"\n(?:<|\s*\d+ \| )")
_TOO_COMPLEX = (
    "too many",
    "max is",
    "limit",
    "too large",
    "too complex",
    "exceeded",
    "fuel",
    "determine",
    "overflow",
)


def explain_failure(message: str) -> str:
    """The cause in one line, without the listing of a grammar that the client never saw.

    Args:
        message: what the engine said.
    """
    if message.startswith("panic"):
        return "the grammar engine failed on this grammar; simplify it"
    if "NoExtension" in message:
        return "no text satisfies the grammar, or none that this model's tokens can write"
    if "lookarounds not supported" in message:
        return "in a regular expression, ^ and $ are supported only where the text begins and ends"
    text = _LISTING.split(message, maxsplit=1)[0].strip()
    place = _PLACE.match(text)
    text = _PREFIX.sub("", _PLACE.sub("", text))
    if _UNSATISFIABLE.match(text):
        return f"no JSON satisfies the schema: {_one_line(_UNSATISFIABLE.sub('', text))}"
    if any(word in text for word in _TOO_COMPLEX):
        return f"too complex: {_one_line(text)}"
    return _one_line(f"line {place[1]}: {text}" if place and "JSON" not in message else text)


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."
