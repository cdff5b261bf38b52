"""JSON in pieces: what of a value is settled so far, and how to close it where the text breaks off."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

MAX_DEPTH = 64
"""Deepest nesting of objects and lists."""
MAX_HELD = 1 << 16
"""Characters held back at most, e.g. of a number that does not end."""

SPACE = re.compile(r"[ \t\n\r]*")

_CONTENT = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER_RUN = re.compile(r"[-+.eE0-9]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?", re.ASCII)
_LITERAL_RUN = re.compile(r"[a-z]*")
_LITERAL = re.compile("true|false|null")
_HEX = re.compile("[0-9a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CLOSERS = {"{": "}", "[": "]"}

# Reads what stands at an index of a text, up to an end, and gives the index after it.
_State = Callable[[str, int, int], int]


class JsonScanner:
    """Follows one JSON value (RFC 8259) through any pieces of text.

    Text is settled as soon as the value can be closed behind it: strings as they come, but an escape, a
    number, a literal or a key with its value's first character only as a whole. A raw control character
    inside a string, which JSON forbids and models write all the same, is settled as its escape; all else is
    settled verbatim. A key may appear twice. What is settled, and what is right or wrong, does not depend on
    how the text was cut.

    Args:
        is_object: the value must be an object.
    """

    def __init__(self, *, is_object: bool = False) -> None:
        self.has_begun = False
        """Something of the value is settled."""
        self.is_complete = False
        self.is_broken = False
        """The character at the returned index cannot come there, or too much would be held back."""
        self._is_object = is_object
        self._stack: list[str] = []
        self._settled: list[str] = []
        self._held: list[str] = []
        self._num_held = 0
        self._token: list[str] = []
        self._is_key = False
        self._has_high_surrogate = False
        self._may_close = False
        self._read: _State = self._read_value

    def feed(self, text: str, at: int, end: int) -> int:
        """Read ``text[at:end]``.

        Returns:
            Index of the first character that was not read: ``end``, the one after the value's last, or the
            one that broke it. A number or literal that is the value itself is complete only at the next
            character.
        """
        while at < end and not self.is_complete and not self.is_broken:
            at = self._read(text, at, min(end, at + MAX_HELD - self._num_held))
            self.is_broken = self.is_broken or self._num_held >= MAX_HELD
        return at

    def take(self) -> str:
        """Text settled since the last call."""
        text = "".join(self._settled)
        self._settled.clear()
        return text

    def close(self) -> str:
        """What, after all settled text, completes the value; empty if it is complete or has not begun."""
        is_inside = self._read in (self._read_string, self._read_escape) and not self._is_key
        quote = '"' if is_inside and not self.is_complete else ""
        return quote + "".join(_CLOSERS[opener] for opener in reversed(self._stack))

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at

    def _hold(self, text: str, num_read: int) -> None:
        self._held.append(text)
        self._num_held += num_read

    def _settle(self, text: str = "") -> None:
        self._settled += self._held
        self._settled.append(text)
        self._held.clear()
        self._num_held = 0
        self.has_begun = True

    def _skip_space(self, text: str, at: int, end: int, *, is_safe: bool) -> int:
        stop = _run_end(SPACE, text, at, end)
        if stop > at:
            self._hold(text[at:stop], stop - at)
            if is_safe:
                self._settle()
        return stop

    def _end_value(self) -> None:
        self._read = self._read_next
        self.is_complete = not self._stack

    def _read_value(self, text: str, at: int, end: int) -> int:
        if self._stack:
            at = self._skip_space(text, at, end, is_safe=self._may_close)
        else:
            at = _run_end(SPACE, text, at, end)
        if at == end:
            return at
        char = text[at]
        if char == "]" and self._may_close:
            return self._close(text, at)
        if self._is_object and not self._stack and char != "{":
            return self._break(at)
        if char in "{[":
            return self._open(text, at)
        if char == '"':
            self._is_key = False
            self._read = self._read_string
            self._settle(char)
            return at + 1
        if char in "-0123456789":
            self._read = self._read_number
            return at
        if char in "tfn":
            self._read = self._read_literal
            return at
        return self._break(at)

    def _open(self, text: str, at: int) -> int:
        if len(self._stack) == MAX_DEPTH:
            return self._break(at)
        self._stack.append(text[at])
        self._settle(text[at])
        self._may_close = True
        self._read = self._read_key if text[at] == "{" else self._read_value
        return at + 1

    def _close(self, text: str, at: int) -> int:
        self._stack.pop()
        self._settle(text[at])
        self._end_value()
        return at + 1

    def _read_key(self, text: str, at: int, end: int) -> int:
        at = self._skip_space(text, at, end, is_safe=self._may_close)
        if at == end:
            return at
        if text[at] == "}" and self._may_close:
            return self._close(text, at)
        if text[at] != '"':
            return self._break(at)
        self._is_key = True
        self._read = self._read_string
        self._hold('"', 1)
        return at + 1

    def _read_colon(self, text: str, at: int, end: int) -> int:
        at = self._skip_space(text, at, end, is_safe=False)
        if at == end:
            return at
        if text[at] != ":":
            return self._break(at)
        self._hold(":", 1)
        self._may_close = False
        self._read = self._read_value
        return at + 1

    def _read_next(self, text: str, at: int, end: int) -> int:
        at = self._skip_space(text, at, end, is_safe=True)
        if at == end:
            return at
        if text[at] == _CLOSERS[self._stack[-1]]:
            return self._close(text, at)
        if text[at] != ",":
            return self._break(at)
        self._hold(",", 1)
        self._may_close = False
        self._read = self._read_key if self._stack[-1] == "{" else self._read_value
        return at + 1

    def _read_string(self, text: str, at: int, end: int) -> int:
        stop = _run_end(_CONTENT, text, at, end)
        if stop > at:
            self._end_character(text[at:stop], stop - at)
            return stop
        if text[at] == "\\":
            self._read = self._read_escape
            return at
        if text[at] != '"':
            self._end_character(json.dumps(text[at])[1:-1], 1)
            return at + 1
        self._hold('"', 1)
        self._has_high_surrogate = False
        if self._is_key:
            self._read = self._read_colon
        else:
            self._settle()
            self._end_value()
        return at + 1

    def _end_character(self, text: str, num_read: int, *, is_high_surrogate: bool = False) -> None:
        """Whole characters of a string were read. The first half of a surrogate pair waits for the second."""
        self._hold(text, num_read)
        self._has_high_surrogate = is_high_surrogate
        if not self._is_key and not is_high_surrogate:
            self._settle()

    def _read_escape(self, text: str, at: int, end: int) -> int:
        token, char = self._token, text[at]
        wanted = _HEX.match(char) if len(token) >= 2 else token == [] or char in '"\\/bfnrtu'
        if not wanted:
            return self._break(at)
        token.append(char)
        if len(token) == 6 or (len(token) == 2 and char != "u"):
            escape = "".join(token)
            token.clear()
            self._read = self._read_string
            # A second first half has no second: the pair that is waited for begins with the last.
            is_high = len(escape) == 6 and 0xD800 <= int(escape[2:], 16) <= 0xDBFF
            if is_high and self._has_high_surrogate and not self._is_key:
                self._settle()
            self._end_character(escape, len(escape), is_high_surrogate=is_high)
        return at + 1

    def _read_number(self, text: str, at: int, end: int) -> int:
        return self._read_token(text, at, end, _NUMBER_RUN, _NUMBER)

    def _read_literal(self, text: str, at: int, end: int) -> int:
        return self._read_token(text, at, end, _LITERAL_RUN, _LITERAL)

    def _read_token(self, text: str, at: int, end: int, run: re.Pattern[str], whole: re.Pattern[str]) -> int:
        """A token that ends with the first character which cannot be part of it."""
        stop = _run_end(run, text, at, end)
        if stop > at:
            self._token.append(text[at:stop])
            self._hold(text[at:stop], stop - at)
        if stop < end:
            token = "".join(self._token)
            self._token.clear()
            if not whole.fullmatch(token):
                return self._break(stop)
            self._settle()
            self._end_value()
        return stop


class StringReader:
    """Decodes one JSON string through any pieces of text; lone surrogates become U+FFFD."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._is_first = True

    @property
    def is_complete(self) -> bool:
        """The closing quote was read."""
        return self._scanner.is_complete

    @property
    def is_broken(self) -> bool:
        """As in ``JsonScanner``."""
        return self._scanner.is_broken

    def feed(self, text: str, at: int, end: int) -> int:
        """As in ``JsonScanner``; the string begins with its opening quote."""
        return self._scanner.feed(text, at, end)

    def take(self) -> str:
        """Characters decoded since the last call."""
        # Settled text holds whole escapes and whole surrogate pairs: it decodes piece by piece.
        text = self._scanner.take()
        if self._is_first:
            self._is_first = not text
            text = text[1:]
        if self.is_complete and text:
            text = text[:-1]
        decoded: str = json.loads(f'"{text}"')
        return _SURROGATE.sub("\ufffd", decoded)


def _run_end(pattern: re.Pattern[str], text: str, at: int, end: int) -> int:
    match = pattern.match(text, at, end)
    return at if match is None else match.end()
