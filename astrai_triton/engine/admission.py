"""Which waiting task starts: the queue, the room in the pool, and what each key has been served."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from astrai_triton.cache import PagePool
from astrai_triton.engine.queue import WaitingQueue
from astrai_triton.engine.stats import StepStats
from astrai_triton.engine.task import Task

MAX_PASSED = 4
"""Waiting tasks that are tried after one that does not fit."""


class Admission:
    """Starts waiting tasks in the order of their queue; where one does not fit, a few after it are tried.

    Args:
        pool: owner of the KV cache.
        stats: counters to keep.
        fail: ends a task that could not be started for a fault of its own.
        max_overtaken: see ``WaitingQueue``.
    """

    def __init__(
        self,
        pool: PagePool,
        stats: StepStats,
        fail: Callable[[Task, Exception], None],
        max_overtaken: int,
    ) -> None:
        self._pool = pool
        self._stats = stats
        self._fail = fail
        self._blocked: tuple[int, int] | None = None
        self.waiting = WaitingQueue(max_overtaken)

    def receive(self, arrived: Sequence[Task], running: Sequence[Task]) -> None:
        """Take new tasks, in the order of their arrival numbers."""
        unmetered = _count_unmetered(running)
        for task in arrived:
            self.waiting.push(task, unmetered)

    def release_forks(self) -> None:
        """Let tasks start that waited for another to compute their prompt, if it has or has ended."""
        for task in self.waiting.release():
            leader, task.leader = task.leader, None
            scores = None if leader is None else leader.prompt_scores
            if scores is not None and scores.is_complete:
                task.prompt_scores = scores
            self._blocked = None

    def restore(self, task: Task) -> None:
        """Take back a task that was preempted."""
        self.waiting.restore(task)

    def charge(self, task: Task, num_prompt_tokens: int = 0) -> None:
        """Put what a task was served since the last time on its key's meter."""
        num_tokens = num_prompt_tokens + task.num_generated - task.num_metered
        task.num_metered = task.num_generated
        if num_tokens:
            self.waiting.charge(task.key, num_tokens)
            self._stats.record_served(task.key, num_tokens)

    def start_next(self, running: Sequence[Task]) -> Task | None:
        """Start one task: it leaves the queue and holds a lease, or it has failed and is done.

        Args:
            running: tasks that run.

        Returns:
            The task, or None if none fits.
        """
        if not len(self.waiting):
            return None
        # Only looked at again when pages have come or gone, or somebody has arrived.
        state = (len(self.waiting), self._pool.num_free_pages())
        if running and self._blocked == state:
            return None
        for num_passed, task in enumerate(self.waiting.candidates(_count_unmetered(running))):
            if num_passed > MAX_PASSED:
                break
            if self._try_start(task, running):
                self.waiting.take(task)
                return task
        self._blocked = state
        return None

    def _try_start(self, task: Task, running: Sequence[Task]) -> bool:
        try:
            return self._start(task, running)
        except Exception as error:  # noqa: BLE001 - a fault belongs to the task that causes it
            self._fail(task, error)
            return True

    def _start(self, task: Task, running: Sequence[Task]) -> bool:
        """Give ``task`` a row and its cached prefix, if there is room for the rest of it."""
        lease = self._pool.open(_select_findable(task), task.salt)
        if lease is None:
            return False
        # Held from here on, so that a fault below cannot lose it.
        task.lease = lease
        # A task that was preempted waits for room for its whole answer, or it would be preempted again.
        goal = task.prompt_len + task.max_tokens if task.num_preempted else len(task.tokens)
        needed = self._pool.pages_needed(lease, goal)
        # One page per running task: what they may ask for in the next step.
        if running and needed and needed + len(running) > self._pool.num_free_pages():
            task.lease = None
            self._pool.close(lease)
            return False
        task.num_prefilled = lease.cached_len
        if task.num_preempted:
            self._stats.num_recomputed += max(0, task.num_lost - lease.cached_len)
        else:
            self.charge(task, task.prompt_len - lease.cached_len)
            task.started_at = time.monotonic()
            self._stats.record_wait(task.started_at - task.submitted_at)
            task.cached_tokens = lease.cached_len
            task.handle.mark_started(task.cached_tokens)
        return True


def _select_findable(task: Task) -> list[int]:
    """Tokens to look up in the prefix cache: a cached token gives no logits, so nothing beyond what is
    scored."""
    scores = task.prompt_scores
    if scores is None or scores.is_complete:
        return task.tokens
    return task.tokens[: scores.num_known]


def _count_unmetered(running: Sequence[Task]) -> dict[str | None, int]:
    """Tokens that running tasks were served since they were last put on their key's meter."""
    unmetered: dict[str | None, int] = {}
    for task in running:
        unmetered[task.key] = unmetered.get(task.key, 0) + task.num_generated - task.num_metered
    return unmetered
