"""Finds the calls of tools in an answer while it is being written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from astrai_server.answer import CallArguments, CallStart, Piece, Text
from astrai_server.tools.call import CallReader
from astrai_server.tools.scanner import MAX_HELD

ToolFormat: TypeAlias = Literal["hermes", "json", "auto"]

OPENING_TAG = "<tool_call>"
CLOSING_TAG = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MAX_SPACE = 64
"""White space before a call that is dropped; of a longer run, the first part is text."""

_SPACE = re.compile(r"\s*")
_OPENING = re.compile(OPENING_TAG)
_EITHER_TAG = re.compile("</?tool_call>")
_BEFORE_OBJECT = re.compile(r"[ \t\n\r]*")
# Between calls, and what models leave over behind one.
_SEPARATORS = re.compile(r"[\s,;\]}]*")

_State = Callable[[str, int], int]


class ToolCallParser:
    """Splits an answer into text and calls; joined, the outcome is the same for any pieces of text.

    Two formats are known. ``hermes``: any number of ``<tool_call>`` JSON ``</tool_call>`` anywhere, with one
    object, several, or a list of them in one tag; at the end of the answer the closing tag may be missing.
    ``json``: the answer begins, after white space and ``<|python_tag|>``, with an object or a list, and more
    follow after white space, comma or semicolon. ``auto`` knows both. How an object is read, ``CallReader``
    says.

    What only looks like a call is text, verbatim. A call that goes wrong after its ``CallStart`` keeps the
    arguments so far, closed to valid JSON, and what follows up to the closing tag, or the end of the answer,
    is dropped. White space around calls is dropped. At most ``MAX_HELD`` characters are held back.

    Args:
        names: tools that may be called.
        tool_format: see above.
        is_parallel: whether more than one call is wanted. If not, whatever follows the first is dropped.
        new_id: gives the id of each call.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        tool_format: ToolFormat,
        is_parallel: bool = True,
        new_id: Callable[[], str],
    ) -> None:
        self.num_calls = 0
        """Calls that have started."""
        self.is_done = False
        """Nothing more is wanted: the only call that may come is complete."""
        self._names = frozenset(names)
        self._knows_tags = tool_format != "json"
        self._is_parallel = is_parallel
        self._new_id = new_id
        self._pieces = _Pieces()
        self._rest = ""
        # Of what may become a call, from the white space before it to where its CallStart is certain.
        self._held: list[str] = []
        self._num_held = 0
        self._reader = CallReader(self._names)
        self._is_started = False
        self._has_ended = False
        self._is_tagged = False
        self._is_listed = False
        # A tag with a call in it was not closed yet.
        self._is_open = False
        self._read: _State = self._read_text if tool_format == "hermes" else self._read_beginning

    def push(self, text: str) -> list[Piece]:
        """Read on; what is certain by now."""
        text, at = self._rest + text, 0
        while at < len(text):
            state, begin = self._read, at
            at = state(text, at)
            if at == begin and self._read == state:
                # It waits for more.
                break
        self._rest = text[at:]
        return self._pieces.take()

    def flush(self) -> list[Piece]:
        """The answer is at its end; what was still uncertain. Nothing may be pushed after it."""
        if self._read == self._read_call and self._is_started:
            self._end_arguments()
        elif self._read in (self._read_opening, self._read_call):
            self._give_up()
        elif self._read in (self._read_beginning, self._read_text):
            self._pieces.add_text(self._rest)
        self._rest = ""
        self._read = _read_nothing
        return self._pieces.take()

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_held += len(text)

    def _open(self, before: str, *, is_tagged: bool) -> None:
        """A call may come; ``before`` is text if it does not."""
        self._held, self._num_held = [before], len(before)
        self._is_tagged = is_tagged
        self._is_listed = False
        self._is_open = False
        self._read = self._read_opening

    def _give_up(self) -> None:
        """It was no call."""
        self._pieces.add_text("".join(self._held))
        self._held.clear()
        self._read = self._read_text

    # States. Each reads what stands at an index of a text and gives the index after it.

    def _read_beginning(self, text: str, at: int) -> int:
        """The beginning of an answer that may be plain JSON."""
        stop = _skip(_SPACE, text, at)
        start = max(at, stop - MAX_SPACE)
        self._pieces.add_text(text[at:start])
        if text.startswith(PYTHON_TAG, stop):
            stop += len(PYTHON_TAG)
            self._open(text[start:stop], is_tagged=False)
            return stop
        if stop == len(text) or PYTHON_TAG.startswith(text[stop : stop + len(PYTHON_TAG)]):
            return start
        if text[stop] in "{[":
            self._open(text[start:stop], is_tagged=False)
            return stop
        self._read = self._read_text
        return start

    def _read_text(self, text: str, at: int) -> int:
        if not self._knows_tags:
            self._pieces.add_text(text[at:])
            return len(text)
        match = (_EITHER_TAG if self._is_open else _OPENING).search(text, at)
        if match is not None and match[0] == CLOSING_TAG:
            self._is_open = False
            self._pieces.add_text(text[at : match.start()])
            return match.end()
        tag_at = len(text) - _count_begun(text, at) if match is None else match.start()
        space = max(at, tag_at - MAX_SPACE)
        space += len(text[space:tag_at].rstrip())
        self._pieces.add_text(text[at:space])
        if match is None:
            return space
        self._open(text[space : match.end()], is_tagged=True)
        return match.end()

    def _read_opening(self, text: str, at: int) -> int:
        """Between a tag, or the beginning, and the first object."""
        stop = _skip(_BEFORE_OBJECT, text, at, at + MAX_HELD - self._num_held)
        self._hold(text[at:stop])
        if self._num_held >= MAX_HELD:
            self._give_up()
        elif stop < len(text) and text[stop] == "[" and not self._is_listed:
            self._is_listed = True
            self._hold("[")
            return stop + 1
        elif stop < len(text) and text[stop] == "{":
            self._begin_call()
        elif stop < len(text):
            self._give_up()
        return stop

    def _begin_call(self) -> None:
        self._reader = CallReader(self._names)
        self._is_started = False
        self._has_ended = False
        self._read = self._read_call

    def _read_call(self, text: str, at: int) -> int:
        reader, end = self._reader, len(text)
        if not self._is_started:
            end = min(end, at + MAX_HELD - self._num_held)
        stop = reader.feed(text, at, end)
        if not self._is_started and not reader.is_started:
            self._hold(text[at:stop])
            if reader.is_broken or self._num_held >= MAX_HELD:
                self._give_up()
            return stop
        if not self._is_started:
            self._start_call()
        if not reader.is_broken and not reader.is_complete:
            self._pieces.add_arguments(self.num_calls - 1, reader.take())
            return stop
        self._end_arguments()
        if self.is_done:
            self._read = _read_nothing
        elif reader.is_broken:
            self._read = self._drop
        elif reader.is_over:
            self._read = self._read_after
        return stop

    def _start_call(self) -> None:
        assert self._reader.name is not None
        self._held.clear()
        self._is_started = True
        self._is_open = self._is_tagged
        self._pieces.start_call(CallStart(self.num_calls, self._new_id(), self._reader.name))
        self.num_calls += 1

    def _end_arguments(self) -> None:
        if not self._has_ended:
            self._pieces.add_arguments(self.num_calls - 1, self._reader.take() + self._reader.close())
        self._has_ended = True
        self.is_done = not self._is_parallel

    def _read_after(self, text: str, at: int) -> int:
        """Behind a whole call."""
        stop = _skip(_SEPARATORS, text, at)
        if stop == len(text):
            return stop
        if text[stop] == "{":
            self._held, self._num_held = [], 0
            self._begin_call()
        elif not self._is_tagged:
            self._read = self._read_text
        elif text.startswith(CLOSING_TAG, stop):
            self._end_tag()
            return stop + len(CLOSING_TAG)
        elif text.startswith(OPENING_TAG, stop):
            self._open(OPENING_TAG, is_tagged=True)
            return stop + len(OPENING_TAG)
        elif _count_begun(text, stop) < len(text) - stop:
            self._read = self._drop
        return stop

    def _end_tag(self) -> None:
        self._is_open = False
        self._read = self._read_space

    def _read_space(self, text: str, at: int) -> int:
        self._read = self._read_text
        stop = _skip(_SPACE, text, at)
        if stop == len(text):
            self._read = self._read_space
        return stop

    def _drop(self, text: str, at: int) -> int:
        """What a broken call left over."""
        found = text.find(CLOSING_TAG, at) if self._is_tagged else -1
        if found >= 0:
            self._end_tag()
            return found + len(CLOSING_TAG)
        return len(text) - (_count_begun(text, at) if self._is_tagged else 0)


def _read_nothing(text: str, _: int) -> int:
    return len(text)


def _skip(pattern: re.Pattern[str], text: str, at: int, end: int | None = None) -> int:
    match = pattern.match(text, at, len(text) if end is None else end)
    return at if match is None else match.end()


def _count_begun(text: str, at: int) -> int:
    """Characters at the end of ``text[at:]`` with which a tag may begin."""
    for count in range(min(len(CLOSING_TAG) - 1, len(text) - at), 0, -1):
        end = text[len(text) - count :]
        if OPENING_TAG.startswith(end) or CLOSING_TAG.startswith(end):
            return count
    return 0


class _Pieces:
    """Pieces of one push; what belongs together is joined."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._parts: list[str] = []
        # Call that the parts are arguments of; None where they are text.
        self._index: int | None = None

    def add_text(self, text: str) -> None:
        self._add(None, text)

    def start_call(self, start: CallStart) -> None:
        self._join()
        self._pieces.append(start)

    def add_arguments(self, index: int, text: str) -> None:
        self._add(index, text)

    def take(self) -> list[Piece]:
        self._join()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _add(self, index: int | None, text: str) -> None:
        if text:
            if index != self._index:
                self._join()
                self._index = index
            self._parts.append(text)

    def _join(self) -> None:
        if self._parts:
            text = "".join(self._parts)
            self._pieces.append(Text(text) if self._index is None else CallArguments(self._index, text))
            self._parts.clear()
