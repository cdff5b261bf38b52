"""Keywords of strings: lengths, patterns and formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.numbers import read_count
from astrai_triton.grammar.patterns import translate_pattern

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)

_OWN_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""RFC 3339 as every reader takes it: real dates only, no leap seconds, ``T`` and ``Z`` in upper case."""

_ENGINE_FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
STRING_FORMATS = tuple(sorted(_OWN_FORMATS.keys() | _ENGINE_FORMATS))


def read_string_keywords(schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Lengths, pattern and format in normal form; the pattern in the engine's dialect.

    A format that is spelled out beside a pattern ends up under ``"allOf"``.

    Args:
        schema: its keywords ``minLength``, ``maxLength``, ``pattern`` and ``format`` are read; a format of
            numbers must be taken out before.
        where: place in the document, for errors.

    Raises:
        GrammarError: malformed, or an unknown format.
    """
    found: dict[str, Any] = {}
    for keyword in ("minLength", "maxLength"):
        count = read_count(schema, keyword, where)
        if count is not None:
            found[keyword] = count
    if found.get("minLength", 0) > found.get("maxLength", found.get("minLength", 0)):
        raise GrammarError(f"{where}: minLength {found['minLength']} is above maxLength {found['maxLength']}")
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise GrammarError(f"{where}/pattern: wanted a string")
        found["pattern"] = translate_pattern(schema["pattern"], f"{where}/pattern")
    if "format" in schema:
        name = str(schema["format"])
        if name in _OWN_FORMATS:
            if "pattern" in found:
                found["allOf"] = [{"pattern": _OWN_FORMATS[name]}]
            else:
                found["pattern"] = _OWN_FORMATS[name]
        elif name in _ENGINE_FORMATS:
            found["format"] = name
        else:
            raise GrammarError(
                f"{where}: format {name[:80]!r} is not supported; there are "
                f"{', '.join(STRING_FORMATS)}, or use pattern"
            )
    return found
