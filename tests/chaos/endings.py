"""How a server ends: by a fault it cannot survive, by a signal, by two."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

from chaos.attacks import PATHS, make_chat, require
from chaos.client import Answer, BrokenAnswerError, ClosedError, fetch
from chaos.process import poll
from chaos.reply import read_reply
from chaos.run import Run
from chaos.traps import SLOW

EXIT_S = 30.0
NOTICE_S = 0.5
"""Time a signal gets to be noticed: a second one before that is the same one to the system."""


async def crash(run: Run) -> None:
    """A step loop that cannot go on: the server says so, refuses at once, and still ends when told to."""
    await run.server.ask("fail_steps", count=None)
    run.tally.num_faults += 1

    async def is_dead() -> bool:
        with contextlib.suppress(ClosedError):
            await fetch(run.server.port, "POST", PATHS[0], json.loads(make_chat(run.make_rng(0))[1]))
        return await run.server.health() == 503

    if not await poll(is_dead, run.patience_s):
        run.tally.blame("steps that always fail do not end the loop")
        return
    for i in range(10):
        path, body = make_chat(run.make_rng(i))
        started = time.monotonic()
        answer = await fetch(run.server.port, "POST", path, json.loads(body))
        run.tally.num_requests += 1
        await run.attempt(i, _require(answer, {503}, "a request to a dead engine"))
        if time.monotonic() - started > 5:
            run.tally.blame("a dead engine does not fail fast")
    run.server.terminate()
    await _expect_exit(run, 0, "a dead server, told to stop")


async def drain(run: Run) -> None:
    """SIGTERM with live streams: they finish, new ones are refused, the exit status is 0."""
    run.tally.num_faults += 1
    streams = [asyncio.create_task(_stream(run, 90)) for _ in range(4)]
    if not await poll(lambda: _is_busy(run, 4), run.patience_s, 0.01):
        run.tally.blame("four streams did not start")
    run.server.terminate()
    await asyncio.sleep(NOTICE_S)
    with contextlib.suppress(ClosedError, ConnectionError):
        answer = await fetch(run.server.port, "POST", PATHS[0], json.loads(make_chat(run.make_rng(9))[1]))
        await run.attempt(9, _require(answer, {503}, "a request during the drain"))
    for i, stream in enumerate(streams):
        answer = await stream
        run.tally.num_requests += 1
        if read_reply(answer).finish not in ("length", "max_tokens"):
            run.tally.blame(f"stream {i} did not finish during the drain: {answer.body[-200:]!r}")
    await _expect_exit(run, 0, "a drained server")


async def force(run: Run) -> None:
    """A second signal ends what a drain would wait for."""
    run.tally.num_faults += 1
    stream = asyncio.create_task(_stream(run, 400))
    await poll(lambda: _is_busy(run, 1), run.patience_s, 0.01)
    run.server.terminate()
    await asyncio.sleep(NOTICE_S)
    run.server.terminate()
    await _expect_exit(run, 1, "a server that was told twice")
    with contextlib.suppress(BrokenAnswerError, ClosedError):
        answer = await stream
        if read_reply(answer).finish is not None:
            run.tally.blame("the stream was over before the second signal: too short to prove anything")


async def _require(answer: Answer, allowed: set[int], what: str) -> None:
    require(answer, allowed, what)


async def _is_busy(run: Run, wanted: int) -> bool:
    return bool((await fetch(run.server.port, "GET", "/stats")).json["active_tasks"] >= wanted)


async def _stream(run: Run, max_tokens: int) -> Answer:
    body = {
        "messages": [{"role": "user", "content": SLOW}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    return await fetch(run.server.port, "POST", PATHS[0], body)


async def _expect_exit(run: Run, status: int, what: str) -> None:
    got = await run.server.wait(EXIT_S)
    if got != status:
        run.tally.blame(f"{what}: wanted exit status {status} within {EXIT_S:.0f} s, got {got}")


ENDINGS = (crash, drain, force)
"""Each needs a server of its own."""
