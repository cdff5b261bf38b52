"""Keywords of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.limits import MAX_MIN_ITEMS
from astrai_triton.grammar.numbers import read_count


def read_array_keywords(
    schema: Mapping[str, Any], where: str, read: Callable[[Any, str], Any]
) -> dict[str, Any]:
    """Items and their count in normal form: ``prefixItems`` and ``items`` as in 2020-12.

    Args:
        schema: its keywords of arrays are read; a list under ``items`` is the older spelling of
            ``prefixItems``.
        where: place in the document, for errors.
        read: gives the normal form of a schema; the second argument is its place below ``where``.

    Raises:
        GrammarError: malformed, contradictory or too large.
    """
    found: dict[str, Any] = {}
    items = schema.get("items")
    if isinstance(items, list):
        if "prefixItems" in schema:
            raise GrammarError(
                f"{where}/items: a list beside prefixItems; give one schema for all further items"
            )
        found |= _read_prefix(items, "items", where, read)
        if "additionalItems" in schema:
            found["items"] = read(schema["additionalItems"], "additionalItems")
    else:
        if "prefixItems" in schema:
            found |= _read_prefix(schema["prefixItems"], "prefixItems", where, read)
        if "items" in schema:
            found["items"] = read(items, "items")
        if "additionalItems" in schema:
            # Says nothing without a list under items, but has to be a schema.
            read(schema["additionalItems"], "additionalItems")
    for keyword in ("minItems", "maxItems"):
        count = read_count(schema, keyword, where)
        if count is not None:
            found[keyword] = count
    least = found.get("minItems", 0)
    if least > found.get("maxItems", least):
        raise GrammarError(f"{where}: minItems {least} is above maxItems {found['maxItems']}")
    if least > MAX_MIN_ITEMS:
        raise GrammarError(f"{where}/minItems: {least} items cannot be answered; at most {MAX_MIN_ITEMS}")
    return found


def _read_prefix(items: Any, keyword: str, where: str, read: Callable[[Any, str], Any]) -> dict[str, Any]:
    if not isinstance(items, list):
        raise GrammarError(f"{where}/{keyword}: wanted a list of schemas")
    prefix = [read(item, f"{keyword}/{index}") for index, item in enumerate(items)]
    return {"prefixItems": prefix} if prefix else {}
