"""Regular expressions of JSON Schema (ECMA-262) in the dialect of the grammar engine.

The dialects agree on most of what people write and differ silently in the rest: a bracket inside of a class
nests, ``&&``, ``--`` and ``~~`` are operators there, ``.`` and ``\\s`` match other characters. So every
atom is read here and written anew. What the engine cannot do is refused with a reason.
"""

from __future__ import annotations

import re

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.limits import MAX_PATTERN_CHARS

_DOT = r"[^\n\r\u{2028}\u{2029}]"
_SPACES = r"\t\n\u{b}\u{c}\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}"
_DISPUTED_SPACES = r"\u{1c}-\u{1f}\u{85}\u{feff}"
"""White space to some readers only: neither ``\\s`` nor ``\\S`` matches it here."""
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
_CONTROLS = {"f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B, "0": 0x00}
_COUNT = re.compile(r"\{(\d{1,9})(?:(,)(\d{1,9})?)?\}")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z0-9_=]+\}")
_GROUP_NAME = re.compile(r"\?<([A-Za-z_$][\w$]*)>")


def translate_pattern(pattern: str, where: str) -> str:
    """The same set of texts as ``pattern`` finds a match in, written for the engine.

    Args:
        pattern: in ECMA-262 syntax; unanchored unless it has ``^`` and ``$``.
        where: place in the schema, for errors.

    Raises:
        GrammarError: malformed, or needs look-around, back references or word boundaries.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise GrammarError(f"{where}: {len(pattern)} characters; at most {MAX_PATTERN_CHARS} are taken")
    return _Translation(pattern, where).run()


class _Translation:
    def __init__(self, pattern: str, where: str) -> None:
        self._text = pattern
        self._where = where
        self._at = 0
        self._written: list[str] = []

    def run(self) -> str:
        depth = 0
        can_repeat = False
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in "*+?" or (char == "{" and _COUNT.match(self._text, self._at)):
                if not can_repeat:
                    raise self._error("nothing to repeat")
                self._quantifier()
                can_repeat = False
                continue
            if char == "(":
                depth += 1
                self._group()
            elif char == ")":
                depth -= 1
                if depth < 0:
                    raise self._error("unbalanced parenthesis")
                self._write(")", 1)
            elif char in "^$|":
                self._write(char, 1)
            elif char == "[":
                self._class()
            elif char == "\\":
                self._write(self._escape(), 0)
            elif char == ".":
                self._write(_DOT, 1)
            elif self._text.startswith("{,", self._at):
                raise self._error("a repetition needs its lower bound; write {0,n}")
            else:
                self._write(_spell(ord(char)), 1)
            can_repeat = char not in "(|^$"
        if depth:
            raise self._error("unbalanced parenthesis")
        return "".join(self._written)

    def _write(self, text: str, width: int) -> None:
        self._written.append(text)
        self._at += width

    def _quantifier(self) -> None:
        count = _COUNT.match(self._text, self._at)
        if count:
            low, comma, high = count.groups()
            if high is not None and int(low) > int(high):
                raise self._error("the bounds of a repetition are the wrong way round")
            self._write(
                f"{{{int(low)}{comma or ''}{'' if high is None else int(high)}}}", count.end() - count.start()
            )
        else:
            self._write(self._text[self._at], 1)
        # Whether a repetition is lazy changes which match is found, not whether there is one.
        if self._text.startswith("?", self._at):
            self._at += 1

    def _group(self) -> None:
        start = self._at + 1
        name = _GROUP_NAME.match(self._text, start)
        if name:
            self._write("(?:", name.end() - self._at)
        elif self._text.startswith("?:", start):
            self._write("(?:", 3)
        elif self._text.startswith(("?=", "?!", "?<=", "?<!"), start):
            raise self._error("look-around is not supported")
        elif self._text.startswith("?", start):
            raise self._error("flags are not part of JSON Schema's regular expressions")
        else:
            self._write("(?:", 1)

    def _escape(self) -> str:
        """An escape outside of a class, read and translated."""
        char = self._text[self._at + 1 : self._at + 2]
        if char in ("b", "B"):
            raise self._error("word boundaries are not supported")
        if char == "k" or char in "123456789":
            raise self._error("back references are not supported" if char else "ends in a backslash")
        text, _ = self._shared_escape()
        return text

    def _shared_escape(self, *, is_negated: bool = False) -> tuple[str, int | None]:
        """An escape that means the same everywhere: its translation and, where it is one, its character.

        Args:
            is_negated: it stands in a class that begins with ``^``.
        """
        start = self._at + 1
        char = self._text[start : start + 1]
        if char.lower() in _CLASSES and char:
            self._at += 2
            is_disputed = char.lower() == "s" and char.islower() == is_negated
            members = _CLASSES[char.lower()] + (_DISPUTED_SPACES if is_disputed else "")
            return f"[{'' if char.islower() else '^'}{members}]", None
        named = _PROPERTY.match(self._text, start)
        if named:
            self._at = named.end()
            return f"\\{named[0]}", None
        number = _HEX.match(self._text, start)
        if number:
            self._at = number.end()
            code = int(number[1] or number[2] or number[3], 16)
            if number[2]:
                code = self._join_surrogates(code)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise self._error("no such character")
            return _spell(code), code
        if (
            char == "c"
            and self._text[start + 1 : start + 2].isascii()
            and self._text[start + 1 : start + 2].isalpha()
        ):
            self._at = start + 2
            code = ord(self._text[start + 1]) % 32
        elif char in _CONTROLS and char and not (char == "0" and self._text[start + 1 : start + 2].isdigit()):
            self._at = start + 1
            code = _CONTROLS[char]
        elif char and not (char.isalnum() or char == "_"):
            self._at = start + 1
            code = ord(char)
        else:
            raise self._error(f"unknown escape \\{char}")
        return _spell(code), code

    def _join_surrogates(self, high: int) -> int:
        low = _HEX.match(self._text, self._at + 1) if self._text.startswith("\\", self._at) else None
        if 0xD800 <= high <= 0xDBFF and low and low[2] and 0xDC00 <= int(low[2], 16) <= 0xDFFF:
            self._at = low.end()
            return 0x10000 + ((high - 0xD800) << 10) + int(low[2], 16) - 0xDC00
        return high

    def _class(self) -> None:
        is_negated = self._text.startswith("[^", self._at)
        self._at += 2 if is_negated else 1
        parts: list[str] = []
        while not self._text.startswith("]", self._at):
            text, low = self._class_atom(is_negated=is_negated)
            is_range = self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at)
            if is_range and low is not None:
                back = self._at
                self._at += 1
                _, high = self._class_atom(is_negated=is_negated)
                if high is None:
                    # A hyphen between a character and a class is a hyphen.
                    self._at = back
                elif low > high:
                    raise self._error("the bounds of a range are the wrong way round")
                else:
                    text = f"{_spell(low)}-{_spell(high)}"
            parts.append(text)
        self._at += 1
        if not parts:
            raise self._error("an empty class")
        self._written.append(f"[{'^' if is_negated else ''}{''.join(parts)}]")

    def _class_atom(self, *, is_negated: bool) -> tuple[str, int | None]:
        char = self._text[self._at : self._at + 1]
        if not char:
            raise self._error("unclosed class")
        if char != "\\":
            self._at += 1
            return _spell(ord(char)), ord(char)
        if self._text.startswith("\\b", self._at):
            self._at += 2
            return _spell(8), 8
        if self._text.startswith("\\-", self._at):
            self._at += 2
            return _spell(ord("-")), ord("-")
        return self._shared_escape(is_negated=is_negated)

    def _error(self, reason: str) -> GrammarError:
        shown = self._text if len(self._text) <= 80 else self._text[:77] + "..."
        return GrammarError(f"{self._where}: regular expression {shown!r}, character {self._at}: {reason}")


def _spell(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\u{{{code:x}}}"
