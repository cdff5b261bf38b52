"""The engine as the routes see it: there or not, and how many requests are inside."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from astrai_server.problem import KeyLimitError
from astrai_triton.errors import EngineUnavailableError

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine

State = Literal["loading", "ready", "draining", "dead"]


class EngineGate:
    """Lets requests through to the engine while it is ready. One event loop only.

    loading → ``open`` → ready → ``drain`` → draining; dead as soon as the engine says it is not alive.

    Args:
        engine: None is one that still loads.
        max_per_key: requests of one API key that may be inside at a time; None is no limit.
    """

    def __init__(self, engine: InferenceEngine | None = None, *, max_per_key: int | None = None) -> None:
        self._engine = engine
        self._max_per_key = max_per_key
        self._is_draining = False
        self._num_inside = 0
        self._key_to_num_inside: Counter[str] = Counter()
        self._stay_s = 0.0
        """Moving average of the time a request is inside."""
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
    def enter(self, key: str | None = None) -> Iterator[InferenceEngine]:
        """Let one request in, for as long as it takes to answer it.

        Args:
            key: name of its API key.

        Raises:
            EngineUnavailableError: loading, draining or dead.
            KeyLimitError: too many requests of this key are inside.
        """
        engine = self.engine
        if self.state != "ready":
            reason = "shutting down" if self._is_draining else "dead"
            raise EngineUnavailableError(f"the engine is {reason}; try again later or at another server")
        limit = self._max_per_key
        if key is not None and limit is not None and self._key_to_num_inside[key] >= limit:
            raise KeyLimitError(limit, self._stay_s)
        self._count(key, 1)
        started = time.monotonic()
        try:
            yield engine
        finally:
            self._count(key, -1)
            stay_s = time.monotonic() - started
            self._stay_s += 0.1 * (stay_s - self._stay_s) if self._stay_s else stay_s

    def _count(self, key: str | None, change: int) -> None:
        self._num_inside += change
        if key is not None:
            self._key_to_num_inside[key] += change
            if not self._key_to_num_inside[key]:
                del self._key_to_num_inside[key]
        if self._num_inside:
            self._is_idle.clear()
        else:
            self._is_idle.set()

    async def wait_idle(self) -> None:
        """Return once nobody is inside."""
        await self._is_idle.wait()
