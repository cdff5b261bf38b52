"""One call as models write it: ``{"name": …, "arguments": {…}}``, read in pieces."""

from __future__ import annotations

from collections.abc import Callable, Container

from astrai_server.tools.scanner import SPACE, JsonScanner, StringReader

ARGUMENT_KEYS = ("arguments", "parameters")

_State = Callable[[str, int, int], int]


class CallReader:
    """Reads one call: its name, and its arguments as they come.

    Keys come in any order; keys other than the name's and the arguments' are read over. Of a key given twice
    the first counts. Arguments are an object, or a JSON string with the text of one; null, blank text and
    nothing at all are ``{}``. When the text breaks off after the call has started, ``close`` completes the
    arguments.

    Args:
        names: tools that may be called; another name breaks the call.
    """

    def __init__(self, names: Container[str]) -> None:
        self.name: str | None = None
        self.is_broken = False
        """The character at the returned index cannot come there, or the call as a whole is none."""
        self.is_over = False
        """The object's closing brace was read."""
        self._names = names
        self._key = ""
        self._string = StringReader()
        self._decoded: list[str] = []
        self._skipped = JsonScanner()
        self._arguments: JsonScanner | None = None
        self._is_cut = False
        self._is_absent = False
        self._is_first_key = True
        self._read: _State = self._read_opening

    @property
    def is_started(self) -> bool:
        """The name is known, and the arguments have begun or are known to be absent."""
        has_begun = self._arguments is not None and self._arguments.has_begun
        return self.name is not None and (has_begun or self._is_absent)

    @property
    def is_complete(self) -> bool:
        """All arguments are known, whatever else may follow in the object."""
        is_whole = self._arguments is not None and self._arguments.is_complete
        return self.is_started and (is_whole or self._is_cut or self._is_absent)

    def feed(self, text: str, at: int, end: int) -> int:
        """Read ``text[at:end]``; gives the index of the first character that was not read."""
        while at < end and not self.is_over and not self.is_broken:
            at = self._read(text, at, end)
        return at

    def take(self) -> str:
        """JSON text of the arguments, as far as settled since the last call."""
        return "" if self._arguments is None else self._arguments.take()

    def close(self) -> str:
        """What completes the arguments after all text taken."""
        if self._arguments is not None:
            return self._arguments.close()
        return "{}" if self._is_absent else ""

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at

    def _finish(self, at: int) -> int:
        self.is_over = True
        if self._arguments is None:
            self._is_absent = True
        self.is_broken = self.name is None
        return at

    def _read_opening(self, text: str, at: int, end: int) -> int:
        if text[at] != "{":
            return self._break(at)
        self._read = self._read_key_start
        return at + 1

    def _read_key_start(self, text: str, at: int, end: int) -> int:
        at = _skip_space(text, at, end)
        if at == end:
            return at
        if text[at] == "}" and self._is_first_key:
            return self._finish(at + 1)
        if text[at] != '"':
            return self._break(at)
        self._is_first_key = False
        return self._begin_string(at, self._read_key)

    def _begin_string(self, at: int, state: _State) -> int:
        self._string, self._read = StringReader(), state
        self._decoded.clear()
        return at

    def _decode(self, text: str, at: int, end: int) -> int:
        at = self._string.feed(text, at, end)
        self._decoded.append(self._string.take())
        self.is_broken = self._string.is_broken
        return at

    def _read_key(self, text: str, at: int, end: int) -> int:
        at = self._decode(text, at, end)
        if self._string.is_complete:
            self._key = "".join(self._decoded)
            self._read = self._read_colon
        return at

    def _read_colon(self, text: str, at: int, end: int) -> int:
        at = _skip_space(text, at, end)
        if at == end:
            return at
        if text[at] != ":":
            return self._break(at)
        self._read = self._read_value
        return at + 1

    def _read_value(self, text: str, at: int, end: int) -> int:
        at = _skip_space(text, at, end)
        if at == end:
            return at
        char = text[at]
        if self._key == "name" and self.name is None:
            return self._begin_string(at, self._read_name) if char == '"' else self._break(at)
        if self._key in ARGUMENT_KEYS and self._arguments is None:
            if char in '{"':
                self._arguments = JsonScanner(is_object=True)
                if char == "{":
                    self._read = self._read_arguments
                    return at
                return self._begin_string(at, self._read_quoted_arguments)
            # Null is the only literal with this letter.
            if char != "n":
                return self._break(at)
        self._skipped = JsonScanner()
        self._read = self._skip_value
        return at

    def _read_name(self, text: str, at: int, end: int) -> int:
        at = self._decode(text, at, end)
        if self._string.is_complete:
            name = "".join(self._decoded)
            if name not in self._names:
                return self._break(at)
            self.name = name
            self._read = self._read_next
        return at

    def _read_arguments(self, text: str, at: int, end: int) -> int:
        arguments = self._arguments
        assert arguments is not None
        at = arguments.feed(text, at, end)
        self.is_broken = arguments.is_broken
        if arguments.is_complete:
            self._read = self._read_next
        return at

    def _read_quoted_arguments(self, text: str, at: int, end: int) -> int:
        arguments = self._arguments
        assert arguments is not None
        at = self._string.feed(text, at, end)
        self.is_broken = self._string.is_broken
        decoded = self._string.take()
        # What breaks inside is judged at the end of the string: that place does not depend on the pieces.
        arguments.feed(decoded, 0, len(decoded))
        if self._string.is_complete:
            self._end_quoted_arguments(arguments)
        return at

    def _end_quoted_arguments(self, arguments: JsonScanner) -> None:
        self._read = self._read_next
        if not arguments.has_begun and not arguments.is_broken:
            self._arguments = None
        elif not arguments.is_complete:
            self._is_cut = True
            self.is_broken = not self.is_started

    def _skip_value(self, text: str, at: int, end: int) -> int:
        at = self._skipped.feed(text, at, end)
        self._skipped.take()
        self.is_broken = self._skipped.is_broken
        if self._skipped.is_complete:
            self._read = self._read_next
        return at

    def _read_next(self, text: str, at: int, end: int) -> int:
        at = _skip_space(text, at, end)
        if at == end:
            return at
        if text[at] == "}":
            return self._finish(at + 1)
        if text[at] != ",":
            return self._break(at)
        self._read = self._read_key_start
        return at + 1


def _skip_space(text: str, at: int, end: int) -> int:
    match = SPACE.match(text, at, end)
    return at if match is None else match.end()
