"""From settings to a process that serves: listen, load, answer, drain."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from astrai_server.app import create_app
from astrai_server.config import Settings
from astrai_server.connection import Connection
from astrai_server.gate import EngineGate
from astrai_server.keys import KeyRing

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine

logger = logging.getLogger("astrai.server")

KEEPALIVE_S = 75.0
"""Idle connections are kept this long."""
CLOSE_S = 2.0
"""Time the last frames get to leave when the server stops before the answers are complete."""

JOIN_S = 0.2
"""A thread whose work is done needs no longer to end."""

_T = TypeVar("_T")


def run_server(
    settings: Settings,
    load_engine: Callable[[], InferenceEngine],
    *,
    keys: KeyRing | None = None,
    on_listening: Callable[[list[str]], None] | None = None,
    on_ready: Callable[[InferenceEngine], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT. Call it in the main thread, which owns the signals.

    The first signal drains: new requests get 503, running ones ``limits.drain_timeout_s`` to finish. A second
    one ends everything now. Where a thread is still inside native code then, the process ends in here: the
    interpreter cannot be taken down under such a thread.

    Args:
        settings: all settings.
        load_engine: makes the engine; runs in a thread while the server already answers (503).
        keys: who may use the server; None is everybody.
        on_listening: called with the URLs once the socket is open.
        on_ready: called with the engine once it serves.

    Returns:
        Exit status: 0, or 1 where a second signal was needed.

    Raises:
        OSError: the address cannot be listened on.
        Exception: whatever ``load_engine`` raised.
    """
    threads: list[threading.Thread] = []
    status = asyncio.run(_serve(settings, load_engine, keys, on_listening, on_ready, threads))
    for thread in threads:
        thread.join(JOIN_S)
    if any(thread.is_alive() for thread in threads):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


@asynccontextmanager
async def listen(
    settings: Settings, gate: EngineGate, keys: KeyRing | None = None
) -> AsyncIterator[list[str]]:
    """Serve the application in this event loop for the length of the context.

    On leaving, running requests get ``CLOSE_S`` seconds, then they are cancelled.

    Yields:
        The URLs listened on; with ``server.port`` 0 the port is in there.
    """
    runner = web.AppRunner(
        create_app(settings, gate, keys), handler_cancellation=True, shutdown_timeout=CLOSE_S, access_log=None
    )
    await runner.setup()
    assert runner.server is not None
    try:
        make_connection = functools.partial(
            Connection,
            runner.server,
            header_timeout_s=settings.limits.header_timeout_s,
            keepalive_timeout=KEEPALIVE_S,
            access_log=None,
        )
        loop = asyncio.get_running_loop()
        sockets = await loop.create_server(
            make_connection, settings.server.host, settings.server.port, reuse_address=True
        )
        try:
            yield [_format_url(*socket.getsockname()[:2]) for socket in sockets.sockets]
        finally:
            sockets.close()
    finally:
        await runner.cleanup()


async def _serve(
    settings: Settings,
    load_engine: Callable[[], InferenceEngine],
    keys: KeyRing | None,
    on_listening: Callable[[list[str]], None] | None,
    on_ready: Callable[[InferenceEngine], None] | None,
    threads: list[threading.Thread],
) -> int:
    gate = EngineGate(max_per_key=settings.limits.max_requests_per_key)
    signals = _Signals()
    async with listen(settings, gate, keys) as urls:
        if on_listening is not None:
            on_listening(urls)
        loading = _run_in_thread(load_engine, threads)
        await asyncio.wait((loading, signals.first), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            # There is nothing to finish.
            gate.drain()
            return 0
        engine = loading.result()
        gate.open(engine)
        if on_ready is not None:
            on_ready(engine)
        await signals.first
        gate.drain()
        is_forced = await _drain(gate, settings.limits.drain_timeout_s, signals)
        # Ends what still runs, after the current step; those streams end with an error frame.
        stopping = _run_in_thread(engine.shutdown, threads)
        if not is_forced:
            await asyncio.wait((stopping, signals.second), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((stopping,), timeout=CLOSE_S)
    return 1 if signals.second.done() else 0


async def _drain(gate: EngineGate, timeout_s: float, signals: _Signals) -> bool:
    """Wait until every request is answered; True when a second signal came first."""
    logger.info("draining: %d requests get %g s to finish", gate.num_inside, timeout_s)
    idle = asyncio.ensure_future(gate.wait_idle())
    await asyncio.wait((idle, signals.second), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    if gate.num_inside:
        logger.warning("%d requests did not finish in time and are ended", gate.num_inside)
    return signals.second.done()


class _Signals:
    """The first and the second request to stop, as futures."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        for wanted in (self.first, self.second):
            if not wanted.done():
                wanted.set_result(None)
                return


def _run_in_thread(function: Callable[[], _T], threads: list[threading.Thread]) -> asyncio.Future[_T]:
    """Run ``function`` in a daemon thread, which unlike the loop's own cannot hold up the process's end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def call() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as caught:  # noqa: BLE001 - handed to whoever awaits the future
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=call, name=f"astrai-{function.__name__}", daemon=True)
    threads.append(thread)
    thread.start()
    return future


def _format_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
