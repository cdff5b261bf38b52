"""A bare HTTP/1.1 client: it can send anything, and it reads answers strictly."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

import attrs

ANSWER_TIMEOUT_S = 60.0
"""Longest time to any answer. It means that the server hangs: the slowest honest answers take a tenth."""
MAX_ANSWER = 16 << 20

_SEGMENT = 536
_WINDOW = 2048


class ClosedError(Exception):
    """The server closed the connection before the first byte of an answer."""


class BrokenAnswerError(Exception):
    """What came is not an HTTP answer, or it stops in the middle."""


@attrs.frozen
class Answer:
    """One answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One connection. Every wait is limited to ``ANSWER_TIMEOUT_S``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int, *, is_tiny: bool = False) -> Client:
        """Connect.

        Args:
            port: on the loopback interface.
            is_tiny: with a window and segments so small that the server soon has to wait for this reader.
        """
        sock = socket.socket()
        sock.setblocking(False)
        if is_tiny:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
                return cls(*await asyncio.open_connection(sock=sock, limit=_WINDOW if is_tiny else 1 << 16))
        except BaseException:
            sock.close()
            raise

    async def send(self, data: bytes) -> None:
        """Send bytes as they are; raises ``ConnectionError`` where the server is gone."""
        self._writer.write(data)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await self._writer.drain()

    def end(self) -> None:
        """Send nothing more, but go on reading."""
        if not self._writer.is_closing():
            self._writer.write_eof()

    async def read(self, count: int) -> bytes:
        """Up to ``count`` bytes; fewer where the server closes."""
        data = b""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while len(data) < count:
                piece = await self._reader.read(count - len(data))
                if not piece:
                    break
                data += piece
        return data

    async def read_answer(self, *, is_head: bool = False) -> Answer:
        """The next final answer.

        Raises:
            ClosedError: there is none.
            BrokenAnswerError: what comes is none.
            TimeoutError: the server hangs.
        """
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while True:
                status, headers = await self._read_head()
                if status >= 200:
                    break
            body = b"" if is_head or status in (204, 304) else await self._read_body(headers)
        return Answer(status, headers, body)

    async def _read_head(self) -> tuple[int, dict[str, str]]:
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise BrokenAnswerError(f"{error.partial[:100]!r}") from None
            raise ClosedError from None
        except ConnectionError:
            raise ClosedError from None
        first, *lines = head[:-4].decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or words[0] not in ("HTTP/1.1", "HTTP/1.0") or not words[1].isdecimal():
            raise BrokenAnswerError(first[:100])
        pairs = (line.partition(":") for line in lines)
        return int(words[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def _read_body(self, headers: Mapping[str, str]) -> bytes:
        try:
            if headers.get("transfer-encoding", "").lower() == "chunked":
                return await self._read_chunks()
            if "content-length" in headers:
                return await self._reader.readexactly(int(headers["content-length"]))
            return await self._reader.read(MAX_ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise BrokenAnswerError(f"the answer stops in the middle: {error}") from None

    async def _read_chunks(self) -> bytes:
        body = b""
        while True:
            size = int((await self._reader.readuntil(b"\r\n"))[:-2], 16)
            data = await self._reader.readexactly(size + 2)
            if data[-2:] != b"\r\n":
                raise BrokenAnswerError("a chunk does not end with an empty line")
            if not size:
                return body
            body += data[:-2]

    def close(self) -> None:
        """Say goodbye."""
        self._writer.close()

    def abort(self) -> None:
        """Break the connection: the server gets a reset."""
        sock = self._writer.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


def format_request(
    method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """A request as bytes, with a right length unless ``headers`` say otherwise."""
    fields = {"host": "localhost"}
    if body:
        fields |= {"content-type": "application/json", "content-length": str(len(body))}
    fields |= headers or {}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


def encode(body: Any) -> bytes:
    """A body as JSON."""
    return json.dumps(body).encode()


async def fetch(port: int, method: str, target: str, body: Any = None, **headers: str) -> Answer:
    """One request on a connection of its own; ``body`` is sent as JSON."""
    client = await Client.open(port)
    try:
        data = b"" if body is None else encode(body)
        await client.send(format_request(method, target, data, headers | {"connection": "close"}))
        return await client.read_answer(is_head=method == "HEAD")
    finally:
        client.close()
