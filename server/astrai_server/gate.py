"""The engine as the routes see it: there or not, and how many requests are inside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from astrai_triton.errors import EngineUnavailableError

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine

State = Literal["loading", "ready", "draining", "dead"]


class EngineGate:
    """Lets requests through to the engine while it is ready. One event loop only.

    loading → ``open`` → ready → ``drain`` → draining; dead as soon as the engine says it is not alive.
    """

    def __init__(self, engine: InferenceEngine | None = None) -> None:
        self._engine = engine
        self._is_draining = False
        self._num_inside = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def open(self, engine: InferenceEngine) -> None:
        """The engine is loaded."""
        self._engine = engine

    def drain(self) -> None:
        """Let nobody in any more; those inside go on."""
        self._is_draining = True

    @property
    def state(self) -> State:
        """What ``/health`` says."""
        if self._is_draining:
            return "draining"
        if self._engine is None:
            return "loading"
        return "ready" if self._engine.is_alive else "dead"

    @property
    def engine(self) -> InferenceEngine:
        """The engine, whether or not it takes requests.

        Raises:
            EngineUnavailableError: it is still loading.
        """
        if self._engine is None:
            raise EngineUnavailableError("Engine not initialized")
        return self._engine

    @property
    def num_inside(self) -> int:
        """Requests that were let in and have not been answered to the end."""
        return self._num_inside

    @contextmanager
    def enter(self) -> Iterator[InferenceEngine]:
        """Let one request in, for as long as it takes to answer it.

        Raises:
            EngineUnavailableError: loading, draining or dead.
        """
        engine = self.engine
        if self.state != "ready":
            reason = "shutting down" if self._is_draining else "dead"
            raise EngineUnavailableError(f"the engine is {reason}; try again later or at another server")
        self._num_inside += 1
        self._is_idle.clear()
        try:
            yield engine
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._is_idle.set()

    async def wait_idle(self) -> None:
        """Return once nobody is inside."""
        await self._is_idle.wait()
