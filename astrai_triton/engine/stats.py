"""Counters of the step loop."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, get_args

import attrs

from astrai_triton.cache import PoolStats
from astrai_triton.engine.result import FinishReason
from astrai_triton.engine.task import Task

MAX_KEYS = 1024
"""Keys whose tokens are counted; beyond that, the one counted longest is forgotten."""


# fmt: off
STEP_BOUNDS_S = (
    1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0
)
# fmt: on
"""Upper bounds of the classes that durations of steps are counted in."""


@attrs.frozen
class StepHistogram:
    """How long steps took."""

    bounds: tuple[float, ...]
    """Upper bounds in seconds, ascending."""
    counts: tuple[int, ...]
    """Steps above the bound before and not above this one; one more for those beyond the last bound."""
    total: float
    """Seconds of all steps."""


@attrs.define
class StepStats:
    """Counters of the scheduler. Written by its thread, read by any."""

    total_tasks: int = 0
    total_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    step_counts: list[int] = attrs.field(factory=lambda: [0] * (len(STEP_BOUNDS_S) + 1))
    """Steps by duration; see ``STEP_BOUNDS_S``."""
    step_total_s: float = 0.0
    step_us: float = 0.0
    """Moving average over about 50 steps, the model's time included."""
    task_s: float = 0.0
    """Moving average of the time a task spends in the engine once it runs."""
    wait_s: float | None = None
    """Moving average of the time between submission and start; None before the first start."""
    ended: dict[FinishReason, int] = attrs.field(factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    """Tasks that ended, by reason."""
    served: dict[str, int] = attrs.field(factory=dict)
    """Key -> tokens it was served, without those of its running tasks that are not metered yet."""

    def record_step(self, seconds: float) -> None:
        """Count the duration of one step."""
        self.num_steps += 1
        self.step_counts[bisect_left(STEP_BOUNDS_S, seconds)] += 1
        self.step_total_s += seconds
        weight = max(0.02, 1.0 / self.num_steps)
        self.step_us += weight * (seconds * 1e6 - self.step_us)

    def histogram(self) -> StepHistogram:
        """Durations of all steps so far."""
        return StepHistogram(STEP_BOUNDS_S, tuple(self.step_counts), self.step_total_s)

    def record_task(self, seconds: float) -> None:
        """Fold the running time of a task that ended into the average."""
        self.task_s += 0.1 * (seconds - self.task_s) if self.task_s else seconds

    def record_wait(self, seconds: float) -> None:
        """Fold the waiting time of a task that starts into the average."""
        self.wait_s = seconds if self.wait_s is None else self.wait_s + 0.1 * (seconds - self.wait_s)

    def record_served(self, key: str | None, num_tokens: int) -> None:
        """Count tokens that a key was served: prompt tokens computed, and tokens sampled."""
        if key is None:
            return
        if key not in self.served and len(self.served) >= MAX_KEYS:
            del self.served[next(iter(self.served))]
        self.served[key] = self.served.get(key, 0) + num_tokens


def describe_stats(
    stats: StepStats, pool: PoolStats, running: Sequence[Task], num_waiting: int
) -> dict[str, Any]:
    """Put everything an operator may want to know into one mapping. O(running tasks), from any thread.

    Args:
        stats: of the scheduler.
        pool: of the KV cache.
        running: tasks that hold a row; may change meanwhile.
        num_waiting: tasks in the queue.

    Returns:
        Plain values for JSON. ``queue_wait_ms`` and ``step_us`` are moving averages, ``finished`` counts
        tasks by finish reason, ``tokens_by_key`` prompt tokens that were computed and tokens sampled.
    """
    running = tuple(running)
    tokens_by_key = stats.served.copy()
    for task in running:
        if task.key is not None:
            tokens = task.num_generated - task.num_metered
            tokens_by_key[task.key] = tokens_by_key.get(task.key, 0) + tokens
    return {
        "total_tasks": stats.total_tasks,
        "total_tokens": stats.total_tokens,
        "active_tasks": len(running),
        "waiting_queue": num_waiting,
        "pages_total": pool.total,
        "pages_free": pool.free,
        "pages_used": pool.owned,
        "pages_cached": pool.cached,
        "evicted_pages": pool.evicted_pages,
        "cache_hit_rate": pool.hits_tokens / max(1, pool.lookup_tokens),
        "step_us": round(stats.step_us, 1),
        "steps": stats.num_steps,
        "preemptions": stats.num_preemptions,
        "recomputed_tokens": stats.num_recomputed,
        "queue_wait_ms": round((stats.wait_s or 0.0) * 1e3, 1),
        "finished": dict(stats.ended),
        "tokens_by_key": tokens_by_key,
    }
