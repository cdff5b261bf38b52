"""The harness against a real server process: nothing is found in a sound one, what is broken is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from chaos.attacks import UnexpectedError, require
from chaos.canary import Flock
from chaos.client import fetch
from chaos.endings import crash
from chaos.process import ServerProcess
from chaos.reply import Reply
from chaos.run import Run
from chaos.tally import Tally


def attack(directory: Path, use: Callable[[Run], Awaitable[None]]) -> Tally:
    """Run ``use`` against a server of its own."""

    async def start() -> Tally:
        tally = Tally(phase="test")
        run = Run(await ServerProcess.start(directory / "log"), tally, Flock(tally), seed=1, scale=1)
        try:
            await run.meet()
            await use(run)
        finally:
            run.flock.cancel()
            await run.server.kill()
        return tally

    return asyncio.run(start())


def test_the_harness_notices_lost_pages_left_connections_and_faults_that_nobody_meant(tmp_path: Path) -> None:
    steps: list[list[str]] = []

    async def use(run: Run) -> None:
        async def note(check: Awaitable[Any]) -> None:
            run.tally.violations.clear()
            await check
            steps.append(list(run.tally.violations))

        async def inject() -> None:
            body = {"messages": [{"role": "user", "content": "@forward@"}], "max_tokens": 4}
            answer = await fetch(run.server.port, "POST", "/v1/messages", body)
            with pytest.raises(UnexpectedError, match="500"):
                require(answer, {200}, "an honest request")

        run.flock.start(run.server.port)
        await asyncio.sleep(0.5)
        await note(inject())
        await run.flock.stop()
        await note(run.settle())
        await note(run.compare_handles())
        run.patience_s = 0.5
        run.files_at_rest -= 1
        await note(run.compare_handles())
        await run.server.ask("leak")
        await note(run.settle())

    tally = attack(tmp_path, use)
    canaries, sound, clean, left, lost = steps
    assert canaries == sound == clean == []
    assert tally.num_canary_answers > 0
    assert tally.num_canary_differences == 0
    assert "left open" in left[0]
    assert "2 pages lost" in " ".join(lost)
    assert tally.num_pages_lost == 2


def test_a_dead_engine_says_so_and_ends_when_told_to(tmp_path: Path) -> None:
    tally = attack(tmp_path, crash)
    assert tally.violations == []
    assert tally.num_requests == 10


def test_a_canary_that_sings_another_song_is_counted() -> None:
    tally = Tally()
    flock = Flock(tally)
    flock._expected = [Reply("song", "stop")]
    flock.compare(0, Reply("song", "stop"))
    assert tally.violations == []
    flock.compare(0, Reply("sung", "stop"))
    flock.compare(0, Reply("song", "length"))
    assert (tally.num_canary_answers, tally.num_canary_differences, len(tally.violations)) == (3, 2, 2)
