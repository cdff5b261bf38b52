"""The interface of whoever wants to know what every step does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from astrai_triton.engine.result import FinishReason
from astrai_triton.engine.runner import Chunk
from astrai_triton.engine.task import Task


class Observer(Protocol):
    """Is told of each step as it happens, in the scheduler's thread; see ``trace.StepTrace``."""

    def open(self, sizes: Mapping[str, Any]) -> None: ...

    def begin(self, arrived: Sequence[Task], cancelled: Sequence[Task]) -> None: ...

    def run(self, chunks: Sequence[Chunk]) -> None: ...

    def sample(self, task: Task, token_id: int) -> None: ...

    def preempt(self, task: Task) -> None: ...

    def end(self, task: Task, reason: FinishReason) -> None: ...

    def close_step(self) -> None: ...

    def close(self) -> None:
        """The engine was shut down; may be told more than once."""
        ...
