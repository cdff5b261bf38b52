"""CPU time of HTTP and SSE per token: the server's event loop, its clients in another process."""

from __future__ import annotations

import asyncio
import resource
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
from astrai_triton.engine import InferenceEngine

STEP_S = 0.004
"""Pause after each forward, so that every stream gets every token by itself."""


@attrs.frozen(kw_only=True)
class StreamTimes:
    """CPU microseconds of the event loop's thread per token of ``num_streams`` streams."""

    num_streams: int
    num_tokens: int
    cpu_us: float
    user_us: float
    """Of these in user space: what is not the kernel's sending, receiving and waking."""


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
        before = call(_read_cpu)
        num_read = _run_clients(port, num_streams, num_tokens)
        after = call(_read_cpu)
    if num_read != num_streams * num_tokens:
        raise BenchError(f"streams: wanted {num_streams * num_tokens} tokens, the clients got {num_read}")
    user_s, system_s = after[0] - before[0], after[1] - before[1]
    return StreamTimes(
        num_streams=num_streams,
        num_tokens=num_tokens,
        cpu_us=(user_s + system_s) / num_read * 1e6,
        user_us=user_s / num_read * 1e6,
    )


def _read_cpu() -> tuple[float, float]:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_utime, usage.ru_stime


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
