"""One run: the server, its attackers and canaries, and what must be true whenever they rest."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs

from chaos.attacks import UnexpectedError
from chaos.canary import SYSTEM, Flock
from chaos.client import BrokenAnswerError, ClosedError, fetch
from chaos.generate import RequestGenerator
from chaos.process import ServerProcess, poll
from chaos.tally import Tally

WIDTH = 12
"""Attackers at a time."""

# A connection that ends where it should not, no answer, or one that does not hold what it must.
_SIGNS_OF_TROUBLE = (
    ClosedError,
    BrokenAnswerError,
    ConnectionError,
    TimeoutError,
    ValueError,
    LookupError,
    TypeError,
)
_BAD_SIGNS = (
    b"never retrieved",
    b"never awaited",
    b"was destroyed but it is pending",
    b"Exception in callback",
    b"Error handling request",
    b"Unhandled exception",
    b"outside of the application",
    # The canaries' system prompt.
    SYSTEM.encode(),
)


@attrs.define
class Run:
    """What all phases share."""

    server: ServerProcess
    tally: Tally
    flock: Flock
    seed: int
    scale: int
    """How many times as much as in a short run."""
    patience_s: float = 30.0
    """Time the last tasks and connections get to end, and servers to notice things."""
    generator: RequestGenerator = attrs.field(init=False)
    """Of the server's own document."""
    files_at_rest: int = 0
    coroutines_at_rest: int = 0

    async def meet(self) -> None:
        """Learn what the server offers, what the canaries sing, and what is open while nobody is there."""
        self.generator = RequestGenerator((await fetch(self.server.port, "GET", "/openapi.json")).json)
        await self.flock.learn(self.server.port)
        await asyncio.sleep(0.5)
        self.coroutines_at_rest = (await self._audit())["coroutines"]
        self.files_at_rest = self.server.count_files()

    def make_rng(self, i: int) -> random.Random:
        """Random state of case ``i`` of this phase: a function of the seed, whatever runs beside it."""
        return random.Random(f"{self.seed}/{self.tally.phase}/{i}")

    async def spread(self, jobs: Sequence[Callable[[], Awaitable[None]]], width: int = WIDTH) -> None:
        """Run all jobs, ``width`` at a time."""
        pending = iter(jobs)

        async def work() -> None:
            for job in pending:
                await job()

        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(work())

    async def attempt(self, i: int, case: Awaitable[None], name: str = "") -> None:
        """Await one case; what must not be is blamed on the server, with the number of the case."""
        try:
            await case
        except UnexpectedError as error:
            self.tally.blame(f"case {i} {name}: {error}")
        except _SIGNS_OF_TROUBLE as error:
            self.tally.blame(f"case {i} {name}: {type(error).__name__}: {error}")

    async def settle(self) -> None:
        """Wait until the server is at rest, and compare its books with what they must say."""
        if not await poll(self._is_idle, self.patience_s):
            stats = (await fetch(self.server.port, "GET", "/stats")).json
            self.tally.blame(f"not idle after {self.patience_s:g} s: {stats}")
        audit = await self._audit()
        lost = audit["pages_total"] - audit["pages_free"] - audit["pages_cached"]
        self.tally.num_pages_lost += abs(lost)
        if lost:
            self.tally.blame(f"{lost} pages lost: {audit}")

    async def _is_idle(self) -> bool:
        stats = (await fetch(self.server.port, "GET", "/stats")).json
        return not (stats["active_tasks"] or stats["waiting_queue"] or stats["pages_used"])

    async def _audit(self) -> dict[str, Any]:
        try:
            audit = await self.server.ask("audit")
        except RuntimeError as error:
            self.tally.blame(str(error))
            raise
        self.tally.num_preemptions = max(self.tally.num_preemptions, audit["preemptions"])
        self.tally.num_evictions = max(self.tally.num_evictions, audit["evicted_pages"])
        return audit

    def read_log(self) -> None:
        """The server's log must not hold signs of mistakes that no client notices, nor what clients wrote."""
        log = self.server.log.read_bytes()
        for sign in _BAD_SIGNS:
            if sign in log:
                line = next(line for line in log.splitlines() if sign in line)
                self.tally.blame(f"in the log: {line[:300]!r}")

    async def compare_handles(self) -> None:
        """No connection and no coroutine may be left of those that are gone."""

        async def is_clean() -> bool:
            is_same = self.server.count_files() <= self.files_at_rest
            return is_same and (await self._audit())["coroutines"] <= self.coroutines_at_rest

        if not await poll(is_clean, self.patience_s, 0.25):
            audit = await self._audit()
            self.tally.blame(
                f"left open: {self.server.count_files()} files for {self.files_at_rest}, "
                f"{audit['coroutines']} coroutines for {self.coroutines_at_rest}"
            )
