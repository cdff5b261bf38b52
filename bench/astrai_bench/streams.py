"""CPU time of HTTP and SSE per token: the server's event loop, its clients in another process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from astrai_bench.errors import BenchError
from astrai_bench.scripted import ByteTokenizer, TableModel
from astrai_bench.stream_client import END
from astrai_triton.engine import InferenceEngine

STEP_S = 0.004
"""Pause after each forward, so that every stream gets every token by itself."""


@attrs.frozen(kw_only=True)
class StreamTimes:
    """CPU microseconds of the event loop's thread per token of ``num_streams`` streams."""

    num_streams: int
    num_tokens: int
    cpu_us: float
    send_us: float
    """What bare sockets cost for the same bytes to the same clients in the same run: system calls, and waking
    the clients' process."""

    @property
    def own_us(self) -> float:
        """What HTTP and SSE add to that."""
        return self.cpu_us - self.send_us


def time_streams(num_streams: int, num_tokens: int) -> StreamTimes:
    """Let that many clients stream ``num_tokens`` each, one token a step.

    Raises:
        BenchError: the server's packages are missing, or a client did not get its tokens.
    """
    with (
        InferenceEngine(
            TableModel(lambda _: time.sleep(STEP_S)),
            ByteTokenizer(),
            max_batch_size=num_streams,
            max_seq_len=num_tokens + 64,
            n_tokens=num_streams * (num_tokens + 80) // 16 * 16,
            max_step_tokens=max(512, num_streams),
        ) as engine,
        _serve(engine) as (port, call),
    ):
        _run_clients(port, 1, 8)
        before = call(time.thread_time)
        num_read = _run_clients(port, num_streams, num_tokens)
        after = call(time.thread_time)
    if num_read != num_streams * num_tokens:
        raise BenchError(f"streams: wanted {num_streams * num_tokens} tokens, the clients got {num_read}")
    return StreamTimes(
        num_streams=num_streams,
        num_tokens=num_tokens,
        cpu_us=(after - before) / num_read * 1e6,
        send_us=_time_sends(num_streams, num_tokens) / num_read * 1e6,
    )


def _time_sends(num_streams: int, num_tokens: int) -> float:
    """CPU seconds of a thread that sends what the server would, step by step, from plain sockets."""
    # A chunk of a chat completion, in its chunk of HTTP.
    frame = b'ce\r\ndata: {"content":"x"}'.ljust(210, b"x") + b"\n\n\r\n"
    spent: list[float] = []

    def serve(listener: socket.socket) -> None:
        peers = [listener.accept()[0] for _ in range(num_streams)]
        for peer in peers:
            peer.recv(1 << 16)
            # The chunk with the role.
            peer.send(frame)
        started = time.thread_time()
        for _ in range(num_tokens):
            for peer in peers:
                peer.send(frame)
            time.sleep(STEP_S)
        spent.append(time.thread_time() - started)
        for peer in peers:
            peer.send(END)
            peer.close()

    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        _run_clients(listener.getsockname()[1], num_streams, num_tokens)
        thread.join(30)
    if not spent:
        raise BenchError("streams: the bare sockets were not served to the end within 30 s")
    return spent[0]


def _run_clients(port: int, num_streams: int, num_tokens: int) -> int:
    command = [
        sys.executable,
        "-m",
        "astrai_bench.stream_client",
        str(port),
        str(num_streams),
        str(num_tokens),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if run.returncode:
        raise BenchError(f"streams: the clients failed: {run.stderr.strip().splitlines()[-1:]}")
    return int(run.stdout)


@contextmanager
def _serve(engine: InferenceEngine) -> Iterator[tuple[int, Callable[[Callable[[], Any]], Any]]]:
    """The server in a thread; yields its port, and how to call a function in that thread."""
    try:
        from astrai_server.config import ServerSettings, Settings
        from astrai_server.gate import EngineGate
        from astrai_server.run import listen
    except ImportError as error:
        raise BenchError(
            f"streams: the server's packages are missing ({error}); install astrai-triton[serve]"
        ) from error

    loop = asyncio.new_event_loop()
    stop, listening = asyncio.Event(), threading.Event()
    ports: list[int] = []

    async def run() -> None:
        async with listen(Settings(server=ServerSettings(port=0)), EngineGate(engine)) as urls:
            ports.append(int(urls[0].rpartition(":")[2]))
            listening.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    if not listening.wait(30):
        raise BenchError("streams: the server did not begin to listen within 30 s")

    def call(function: Callable[[], Any]) -> Any:
        async def use() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(use(), loop).result(30)

    try:
        yield ports[0], call
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
