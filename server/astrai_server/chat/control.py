"""Keeps text of others from steering the terminal it is shown on."""

from __future__ import annotations

import re
from typing import Literal

_State = Literal["text", "escape", "intermediate", "csi", "string", "string_escape"]

_SUSPECT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_HIGH_SURROGATE = re.compile("[\ud800-\udbff]\\Z")
_STRING_STARTS_AFTER_ESCAPE = frozenset("]PX^_")
_STRING_STARTS = frozenset("\x90\x98\x9d\x9e\x9f")
_STRING_ENDS = frozenset("\x07\x9c")
_CANCELS = frozenset("\x18\x1a")


class ControlFilter:
    """Takes control characters and escape sequences (ECMA-48) out of text that comes in pieces.

    Line feeds and tabs stay, a carriage return is a line feed unless one follows. A sequence goes as a whole,
    wherever the pieces are cut; one that never ends hides nothing beyond its line. Surrogates become the
    character that a pair stands for, or U+FFFD.
    """

    def __init__(self) -> None:
        self._state: _State = "text"
        self._is_after_return = False
        self._high_surrogate = ""

    def feed(self, piece: str) -> str:
        """The part of the next piece that may be shown."""
        piece, self._high_surrogate = self._high_surrogate + piece, ""
        if _HIGH_SURROGATE.search(piece):
            piece, self._high_surrogate = piece[:-1], piece[-1]
        if self._state == "text" and not self._is_after_return and not _SUSPECT.search(piece):
            return piece
        return "".join(map(self._take, repair_surrogates(piece)))

    def _take(self, char: str) -> str:
        """``char`` as it may be shown, "" if it may not."""
        if self._state == "text":
            return self._take_text(char)
        if char in _CANCELS:
            self._state = "text"
            return ""
        after = self._after_string(char) if self._state.startswith("string") else self._after_escape(char)
        self._state = after or "text"
        return "" if after else self._take_text(char)

    def _take_text(self, char: str) -> str:
        is_after_return, self._is_after_return = self._is_after_return, char == "\r"
        if char == "\r":
            return "\n"
        if char == "\n" and is_after_return:
            return ""
        if not _SUSPECT.match(char):
            return char
        if char == "\x1b":
            self._state = "escape"
        elif char == "\x9b":
            self._state = "csi"
        elif char in _STRING_STARTS:
            self._state = "string"
        return ""

    def _after_escape(self, char: str) -> _State | None:
        """State after a character of an escape or control sequence; None if it is no part of one."""
        if self._state == "csi":
            if "\x20" <= char <= "\x3f":
                return "csi"
            return "text" if "\x40" <= char <= "\x7e" else None
        if "\x20" <= char <= "\x2f":
            return "intermediate"
        if self._state == "escape" and char == "[":
            return "csi"
        if self._state == "escape" and char in _STRING_STARTS_AFTER_ESCAPE:
            return "string"
        return "text" if "\x30" <= char <= "\x7e" else None

    def _after_string(self, char: str) -> _State | None:
        """State after a character of a title, a link or the like; None if it is no part of it."""
        if char in _STRING_ENDS or (self._state == "string_escape" and char == "\\"):
            return "text"
        if char in "\r\n":
            return None
        return "string_escape" if char == "\x1b" else "string"


def strip_controls(text: str) -> str:
    """``text`` as a whole without what would steer a terminal."""
    return ControlFilter().feed(text)


def make_line(text: str, max_chars: int = 300) -> str:
    """``text`` on one line of at most ``max_chars`` characters, without controls."""
    line = " ".join(strip_controls(text).split())
    return line if len(line) <= max_chars else f"{line[: max_chars - 3]}..."


def repair_surrogates(text: str) -> str:
    """``text`` that can be encoded: pairs of surrogates are joined, single ones become U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
