"""How large a schema may be, so that a hostile one costs bounded time and memory.

The first group keeps the grammar engine, which recurses over schemas on the native stack, from overflowing
it: a chain of a few hundred references ends the process otherwise. The second keeps compilation below a
second, the third keeps the lexer's automaton, which is built while an answer grows, below some tens of MiB.
"""

from __future__ import annotations

MAX_DEPTH = 32
"""Schemas inside schemas at one place of the document."""

MAX_CHAIN = 128
"""Schemas on the longest way down from the root, references followed at first sight: 4 KiB of stack each."""

MAX_NESTING = 100
"""Brackets inside brackets of the schema's JSON text; the engine's JSON parser stops at 128."""

MAX_CHARS = 262_144
"""Characters of a grammar's source."""

MAX_SCHEMAS = 4_000
"""Schemas in a document, referenced ones included; booleans count."""

MAX_PROPERTIES = 400
"""Properties of one object. All of them optional, each is a few items of the parser's first row."""

MAX_BRANCHES = 256
"""Schemas of one ``anyOf``, ``oneOf`` or ``allOf``; the parser follows all of them at once."""

MAX_VALUES = 20_000
"""Values in all ``enum``s and ``const``s together, parts of arrays and objects included."""

MAX_PATTERNS = 32
"""Different patterns and formats; some milliseconds each to try."""

MAX_PATTERN_CHARS = 4_096
"""Characters of one pattern."""

MAX_COUNTED_CHARS = 20_000
"""Sum of the length limits of different string schemas: a counted character is some states of the lexer."""

MAX_MIN_ITEMS = 10_000
"""Items that an array may be made to have."""

MAX_MULTIPLE = 10_000
"""``multipleOf`` without its decimal point: as many states of the lexer."""
