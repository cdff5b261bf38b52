"""What text an answer may consist of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

import attrs

from astrai_triton.grammar.schema import normalize_schema

GrammarKind = Literal["json_schema", "lark", "regex"]

# White space between the tokens of JSON: a space, or a new line and an indent of up to 16 levels of two
# spaces. Once at each place, so that blanks never go on. Escapes are those with one spelling; with \u every
# property name would have several, and a property could come twice. The dialect is not the client's to
# choose.
_ENGINE_OPTIONS = {
    "whitespace_pattern": r"[ ]|\n[ ]{0,32}|\n\t{0,16}",
    "json_allowed_escapes": 'nrbtf\\"',
}
EMBED_MARK = '{"x-guidance":' + json.dumps(_ENGINE_OPTIONS, separators=(",", ":"))
"""How every schema begins that the engine gets; no text between quotes looks like this."""


@attrs.frozen
class Grammar:
    """A rule that a whole answer obeys. Hashable plain data; nothing is checked before it is compiled.

    Args:
        kind: what ``source`` is written in.
        source: the JSON text of a JSON Schema, a grammar in llguidance's Lark dialect, or a regular
            expression that the whole answer matches.

    Raises:
        ValueError: ``kind`` is none of these.
        TypeError: ``source`` is not a string.
    """

    kind: GrammarKind = attrs.field(validator=attrs.validators.in_(get_args(GrammarKind)))
    source: str = attrs.field(validator=attrs.validators.instance_of(str))

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """A JSON text that is valid under ``schema``.

        Raises:
            TypeError: ``schema`` has a value that is not JSON.
            ValueError: ``schema`` has NaN or an infinity, contains itself or nests too deeply.
        """
        try:
            source = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except RecursionError as error:
            raise ValueError("schema: nests too deeply") from error
        return cls("json_schema", source)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """A text that the start rule of a Lark grammar derives; schemas in it come from ``embed_schema``."""
        return cls("lark", source)

    @classmethod
    def regex(cls, source: str) -> Grammar:
        """A text that a regular expression matches from its first to its last character."""
        return cls("regex", source)


def embed_schema(schema: Mapping[str, Any] | bool) -> str:
    """A schema as it stands after ``%json`` in a Lark grammar, checked as ``Grammar.json_schema`` is.

    ``Grammar.lark('start: "<call>" %json ' + embed_schema(schema) + ' "</call>"')``. White space is bounded
    inside of the JSON and there is none before or after it.

    Args:
        schema: a parsed JSON Schema.

    Raises:
        GrammarError: malformed, unsupported, contradictory or too large; names the place and the keyword.
    """
    return embed_settled(normalize_schema(schema))


def embed_settled(schema: Mapping[str, Any]) -> str:
    """The text of a schema in normal form, with the options under which the engine reads it."""
    return json.dumps({"x-guidance": _ENGINE_OPTIONS, **schema}, ensure_ascii=False, separators=(",", ":"))
