"""Server-sent events as they arrive, in pieces cut anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator

from astrai_server.chat.errors import ChatError

MAX_EVENT_BYTES = 16 << 20

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventReader:
    """Bytes -> the data of each event.

    As the HTML standard has it: lines end with LF, CR LF or CR, several ``data`` lines are joined by line
    feeds, comments and unknown fields are skipped. Names of events and ids are of no use here.

    Raises:
        ChatError: an event is larger than ``MAX_EVENT_BYTES``.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """Pieces of the line that has not ended."""
        self._data: list[str] = []
        self._num_bytes = 0
        self._is_after_return = False
        self._is_first_line = True

    def feed(self, piece: bytes) -> Iterator[str]:
        """Data of the events that end in ``piece``."""
        if self._is_after_return and piece.startswith(b"\n"):
            piece, self._is_after_return = piece[1:], False
        if not piece:
            return
        self._is_after_return = piece.endswith(b"\r")
        *ends, rest = _LINE_END.split(piece)
        for end in ends:
            self._count(end)
            self._line.append(end)
            yield from self._end_line()
        self._count(rest)
        self._line.append(rest)

    def finish(self) -> Iterator[str]:
        """Data of an event that the end of the stream cut off; it need not be whole."""
        yield from self._end_line()
        yield from self._end_event()

    def _count(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_EVENT_BYTES:
            raise ChatError(f"the server sent an event of more than {MAX_EVENT_BYTES >> 20} MiB")

    def _end_line(self) -> Iterator[str]:
        line = b"".join(self._line)
        self._line.clear()
        if self._is_first_line:
            line, self._is_first_line = line.removeprefix(_BYTE_ORDER_MARK), False
        if not line:
            yield from self._end_event()
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))

    def _end_event(self) -> Iterator[str]:
        self._num_bytes = 0
        if self._data:
            data = "\n".join(self._data)
            self._data.clear()
            yield data
