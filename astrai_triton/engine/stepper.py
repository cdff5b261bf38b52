"""One step of continuous batching, and the tasks it moves. The same input gives the same steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from astrai_triton.cache import PagePool
from astrai_triton.engine.budget import POLICIES, PolicyName
from astrai_triton.engine.queue import MAX_OVERTAKEN, WaitingQueue
from astrai_triton.engine.result import FinishReason, TokenEvent, wake_readers
from astrai_triton.engine.runner import Chunk, ModelRunner, group_by_backend
from astrai_triton.engine.sampling import SampledToken
from astrai_triton.engine.stats import StepStats
from astrai_triton.engine.task import Task
from astrai_triton.errors import OutOfPagesError

logger = logging.getLogger("astrai.engine")

MAX_PASSED = 4
"""Waiting tasks that are tried after one that does not fit."""


class Observer(Protocol):
    """What wants to know what a step does; see ``trace``."""

    def open(self, sizes: Mapping[str, Any]) -> None: ...

    def begin(self, arrived: Sequence[Task], cancelled: Sequence[Task]) -> None: ...

    def run(self, chunks: Sequence[Chunk]) -> None: ...

    def sample(self, task: Task, token_id: int) -> None: ...

    def preempt(self, task: Task) -> None: ...

    def end(self, task: Task, reason: FinishReason) -> None: ...

    def close_step(self) -> None: ...


class Stepper:
    """The tasks of an engine and the rules by which they move on.

    A step takes in what arrived and what was cancelled, starts waiting tasks while rows and pages last,
    prefills within a token budget, decodes one token of every task whose prompt is complete, and gives back
    what ended tasks hold. When pages run out the youngest task gives up its pages and keeps its place.

    Args:
        runner: runs the model.
        pool: owner of the KV cache.
        stats: counters to keep.
        max_batch_size: tasks that may run at once.
        max_step_tokens: rows of one step; decodes count first, the rest goes to prefill chunks.
        policy: how prompts share the rest; see ``budget``.
        max_overtaken: see ``WaitingQueue``.
        observer: is told what every step does.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: PagePool,
        stats: StepStats,
        *,
        max_batch_size: int,
        max_step_tokens: int,
        policy: PolicyName = "budget",
        max_overtaken: int = MAX_OVERTAKEN,
        observer: Observer | None = None,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._stats = stats
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self._share = POLICIES[policy]
        self._observer = observer
        self._unread: list[Task] = []
        self._orphaned: list[Task] = []
        self._blocked: tuple[int, int] | None = None
        self.waiting = WaitingQueue(max_overtaken)
        self.running: list[Task] = []

    def step(self, arrived: Sequence[Task] = (), cancelled: Sequence[Task] = ()) -> int:
        """One turn: everything that can move on moves on once.

        Args:
            arrived: new tasks, in the order of their arrival numbers.
            cancelled: tasks to end; those that have ended already stay as they are.

        Returns:
            How many tasks ended and were cleaned up.
        """
        self._receive(arrived)
        cancelled = [*cancelled, *self._take_orphans()]
        if self._observer is not None:
            self._observer.begin(arrived, cancelled)
        for task in cancelled:
            if not task.is_done:
                self._publish(task, task.end("cancelled"))
        num_ended = self._clean_up()
        self._refill()
        self._prefill()
        self._decode()
        num_ended += self._clean_up()
        if self._observer is not None:
            self._observer.close_step()
        return num_ended

    def end_all(
        self, reason: FinishReason, error: BaseException | None = None, arrived: Sequence[Task] = ()
    ) -> int:
        """End every task, those that just arrived too; the pool gets everything back. Returns how many there
        were."""
        tasks = [*self.running, *self.waiting.clear(), *arrived]
        self.running.clear()
        for task in tasks:
            if not task.is_done:
                self._publish(task, task.end(reason, error=error))
            lease, task.lease = task.lease, None
            if lease is not None:
                try:
                    self._pool.close(lease)
                except Exception:
                    # The other tasks must still hear of their end.
                    logger.exception("the pages of task %s could not be freed", task.handle.id)
        self._announce()
        return len(tasks)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or len(self.waiting) or self._orphaned)

    # In and out

    def _take_orphans(self) -> list[Task]:
        orphans, self._orphaned = self._orphaned, []
        return orphans

    def _receive(self, arrived: Sequence[Task]) -> None:
        if arrived:
            unmetered = self._count_unmetered()
            for task in arrived:
                self.waiting.push(task, unmetered)

    def _clean_up(self) -> int:
        """Record complete pages of tasks that ended and free what they hold."""
        ended = [task for task in self.running if task.is_done]
        if ended:
            self.running = [task for task in self.running if not task.is_done]
        ended += self.waiting.remove_done()
        now = time.monotonic() if ended else 0.0
        for task in ended:
            self._release(task)
            self._charge(task)
            if task.started_at:
                self._stats.record_task(now - task.started_at)
        return len(ended)

    def _release(self, task: Task) -> None:
        """Enter the task's complete pages into the prefix cache and give everything back."""
        lease, task.lease = task.lease, None
        if lease is None:
            return
        try:
            self._pool.record(lease, task.tokens[: task.num_computed])
        except Exception:
            # Without the record the pages are only not reused.
            logger.exception("the pages of task %s could not be recorded", task.handle.id)
        finally:
            self._pool.close(lease)

    def _fail(self, task: Task, error: Exception) -> None:
        """End one task with an error that nobody else is to feel."""
        logger.error("task %s failed", task.handle.id, exc_info=error)
        self._publish(task, task.end("error", error=error))

    def _publish(self, task: Task, event: TokenEvent) -> None:
        """Post an event; readers on an event loop are woken together by ``_announce``."""
        event = task.call_back(event)
        if event.finish_reason is not None and self._observer is not None:
            self._observer.end(task, event.finish_reason)
        task.handle.post(event)
        self._unread.append(task)

    def _announce(self) -> None:
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        orphans = {id(handle) for handle in wake_readers([task.handle for task in unread])}
        if orphans:
            self._orphaned += [task for task in unread if id(task.handle) in orphans and not task.is_done]

    # Meters

    def _count_unmetered(self) -> dict[str | None, int]:
        """Tokens that running tasks were served since they were last put on their key's meter."""
        unmetered: dict[str | None, int] = {}
        for task in self.running:
            unmetered[task.key] = unmetered.get(task.key, 0) + task.num_generated - task.num_metered
        return unmetered

    def _charge(self, task: Task, num_prompt_tokens: int = 0) -> None:
        num_tokens = num_prompt_tokens + task.num_generated - task.num_metered
        task.num_metered = task.num_generated
        if num_tokens:
            self.waiting.charge(task.key, num_tokens)

    # Start

    def _refill(self) -> None:
        """Start waiting tasks in their order while rows and pages last; where one does not fit, a few after
        it are tried."""
        while len(self.waiting) and len(self.running) < self._max_batch_size:
            # Only looked at again when pages have come or gone, or somebody has arrived.
            state = (len(self.waiting), self._pool.num_free_pages())
            if self.running and self._blocked == state:
                return
            if not self._start_first():
                self._blocked = state
                return

    def _start_first(self) -> bool:
        """Start the first of the candidates that fits."""
        for num_passed, task in enumerate(self.waiting.candidates(self._count_unmetered())):
            if num_passed > MAX_PASSED:
                break
            try:
                has_started = self._start(task)
            except Exception as error:  # noqa: BLE001 - a fault belongs to the task that causes it
                self._fail(task, error)
                has_started = True
            if has_started:
                self.waiting.take(task)
                self.running.append(task)
                return True
        return False

    def _start(self, task: Task) -> bool:
        """Give ``task`` a row and its cached prefix, if there is room for the rest of it."""
        lease = self._pool.open(task.tokens, task.salt)
        if lease is None:
            return False
        # Held from here on, so that a fault below cannot lose it.
        task.lease = lease
        # A task that was preempted waits for room for its whole answer, or it would be preempted again.
        goal = task.prompt_len + task.max_tokens if task.num_preempted else len(task.tokens)
        needed = self._pool.pages_needed(lease, goal)
        # One page per running task: what they may ask for in the next step.
        reserve = len(self.running)
        if self.running and needed and needed + reserve > self._pool.num_free_pages():
            task.lease = None
            self._pool.close(lease)
            return False
        task.num_computed = lease.cached_len
        if task.num_preempted:
            self._stats.num_recomputed += max(0, task.num_lost - lease.cached_len)
        else:
            self._charge(task, task.prompt_len - lease.cached_len)
            task.started_at = time.monotonic()
            task.cached_tokens = lease.cached_len
            task.handle.mark_started(task.cached_tokens)
            self._unread.append(task)
        return True

    def _preempt(self, task: Task) -> None:
        """Take everything from a running task and put it back into the queue at its place."""
        if self._observer is not None:
            self._observer.preempt(task)
        self._charge(task)
        self._release(task)
        self.running.remove(task)
        self._stats.num_preemptions += 1
        task.num_preempted += 1
        task.num_lost, task.num_computed = task.num_computed, 0
        self.waiting.restore(task)

    # Compute

    def _prefill(self) -> None:
        """One ragged forward over chunks of all tasks that still have more than one token to compute."""
        self._announce()
        pending = [task for task in self.running if task.num_pending > 1 or not task.num_generated]
        if not pending:
            return
        budget = max(self._pool.page_size, self._max_step_tokens - (len(self.running) - len(pending)))
        lengths = self._share([task.num_pending for task in pending], budget, self._pool.page_size)
        self._run([Chunk(task, length) for task, length in zip(pending, lengths, strict=True) if length])

    def _decode(self) -> None:
        """One forward for every task whose prompt is complete; each gives one row."""
        self._run([Chunk(task, 1) for task in self.running if task.num_generated and task.num_pending == 1])

    def _run(self, chunks: Sequence[Chunk]) -> None:
        for group in group_by_backend(self._reserve(chunks)):
            if self._observer is not None:
                self._observer.run(group)
            for chunk, token in self._forward(group):
                self._advance(chunk, token)
        self._announce()

    def _reserve(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Give every chunk its slots, oldest task first; out of pages, the youngest running task is
        preempted."""
        granted: list[Chunk] = []
        for chunk in sorted(chunks, key=lambda chunk: chunk.task.arrival):
            task = chunk.task
            while task.lease is not None and not task.is_done:
                try:
                    self._pool.extend(task.lease, chunk.end)
                except OutOfPagesError:
                    self._preempt(max(self.running, key=lambda other: (other.is_done, other.arrival)))
                except Exception as error:  # noqa: BLE001 - a fault belongs to the task that causes it
                    self._fail(task, error)
                else:
                    granted.append(chunk)
                    break
        return [chunk for chunk in granted if chunk.task.lease is not None]

    def _forward(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, SampledToken | None]]:
        """Run ``chunks`` together; if that fails, one by one, so that only those that fail alone end with an
        error."""
        try:
            sampled = iter(self._runner.run(chunks))
        except Exception as error:
            if len(chunks) == 1:
                self._fail(chunks[0].task, error)
                return
            logger.warning("a forward of %d tasks failed; each runs alone now", len(chunks), exc_info=error)
            for chunk in chunks:
                yield from self._forward([chunk])
            return
        for chunk in chunks:
            yield chunk, next(sampled) if chunk.is_last else None

    def _advance(self, chunk: Chunk, token: SampledToken | None) -> None:
        """Take note that a chunk has run, and of the token sampled after it."""
        task, is_last = chunk.task, chunk.is_last
        task.num_computed = chunk.end
        if not is_last or token is None:
            return
        if self._observer is not None:
            self._observer.sample(task, token.token_id)
        try:
            if not task.num_generated and task.lease is not None:
                self._pool.record(task.lease, task.tokens)
            event = task.accept(token) if task.max_tokens else task.end("length")
        except Exception as error:  # noqa: BLE001 - a fault belongs to the task that causes it
            self._fail(task, error)
            return
        self._stats.total_tokens += task.max_tokens > 0
        self._publish(task, event)
