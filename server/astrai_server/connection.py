"""One client's connection: what happens before a request is a request."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from astrai_server.problem import Problem, explain, new_request_id


class Connection(web.RequestHandler):
    """aiohttp's connection with a time limit for headers and our error body for what is not HTTP.

    Args:
        server: the server that accepts.
        header_timeout_s: seconds from the first byte of a request, or from the start of the connection,
            to the end of its headers; then the connection is closed.
        options: as ``web.RequestHandler``.
    """

    __slots__ = ("_has_room", "_header_timeout_s", "_header_timer")

    def __init__(self, server: web.Server, *, header_timeout_s: float, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._header_timeout_s = header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def is_full(self) -> bool:
        """Whether the client is behind with reading: what is written now only piles up."""
        return not self._has_room.is_set()

    async def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until the client has caught up; False when it has not within ``timeout_s`` seconds."""
        try:
            await asyncio.wait_for(self._has_room.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        super().pause_writing()
        self._has_room.clear()

    def resume_writing(self) -> None:
        """It has drained."""
        super().resume_writing()
        self._has_room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock for the first request."""
        super().connection_made(transport)
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        """Stop the clock once a request has begun; start it at the first bytes of the next one."""
        super().data_received(data)
        # aiohttp's loop waits on this future exactly while no request is at hand.
        is_waiting = self._waiter is not None and not self._waiter.done()
        if not is_waiting:
            self._stop_clock()
        elif self._header_timer is None:
            self._start_clock()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what never reached the application: mostly bytes that are not HTTP."""
        if status >= 500:
            # A client that resets its connection in the middle of a body is no fault, and reads no answer.
            is_gone = self.transport is None or self.transport.is_closing()
            if not (is_gone and isinstance(exc, ConnectionError)):
                self.log_exception("a request failed outside of the application", exc_info=exc)
            text, code = "internal error", "internal_error"
        else:
            text, code = "this is not an HTTP request that can be read", "malformed_request"
        return Problem(status=status, message=text, code=code, closes=True).as_response(new_request_id())

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Give the error body to what aiohttp refuses before it asks the application."""
        if isinstance(resp, web.HTTPException):
            resp = explain(resp).as_response(new_request_id())
        finished = await super().finish_response(request, resp, start_time)
        if request.content.exception() is not None:
            # aiohttp would read on, to keep the connection, and log the exception as one that nobody handled.
            self.force_close()
        return finished

    def _start_clock(self) -> None:
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(self._header_timeout_s, self.force_close)

    def _stop_clock(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
