"""The step loop: which tasks run next, and what happens to those that end, fail or have to wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from astrai_triton.cache import PagePool
from astrai_triton.engine.budget import share_budget
from astrai_triton.engine.result import FinishReason, TokenEvent, wake_readers
from astrai_triton.engine.runner import Chunk, ModelRunner, group_by_backend
from astrai_triton.engine.sampling import SampledToken
from astrai_triton.engine.stats import StepStats
from astrai_triton.engine.task import Task
from astrai_triton.errors import EngineUnavailableError, OutOfPagesError, QueueFullError

logger = logging.getLogger("astrai.engine")

MAX_CONSECUTIVE_FAULTS = 3
"""Steps in a row that may fail outside of any task before the scheduler gives up."""


class InferenceScheduler:
    """Continuous batching over a paged KV pool, in a daemon thread.

    One step: take what arrived, clean up what ended, refill from the queue, prefill, decode. Tasks are served
    in the order of arrival; when pages run out the youngest task gives its pages back and keeps its place in
    the queue.

    Args:
        runner: runs the model.
        pool: owner of the KV cache.
        max_batch_size: tasks that may run at once.
        max_step_tokens: rows of one step; decodes count first, the rest goes to prefill chunks.
        max_queue: tasks that may wait.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: PagePool,
        *,
        max_batch_size: int,
        max_step_tokens: int,
        max_queue: int,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self._max_queue = max_queue
        self._inbox: deque[Task] = deque()
        self._waiting: deque[Task] = deque()
        self._running: list[Task] = []
        self._unread: list[Task] = []
        self._blocked: tuple[int, int] | None = None
        self._num_open = 0
        self._lock = threading.Condition()
        self._is_awake = False
        self._is_stopping = False
        self._is_draining = False
        self._fault: BaseException | None = None
        self._num_faults = 0
        self._thread: threading.Thread | None = None
        self.stats = StepStats()

    # Any thread

    @property
    def is_alive(self) -> bool:
        """Whether tasks are accepted or could be after a drain is over."""
        return self._fault is None and not self._is_stopping

    @property
    def num_waiting(self) -> int:
        """Tasks that were accepted and do not run yet."""
        return len(self._inbox) + len(self._waiting)

    @property
    def num_active(self) -> int:
        """Tasks that hold a row of the pool."""
        return len(self._running)

    def start(self) -> None:
        """Start the step loop in a daemon thread."""
        self._thread = threading.Thread(target=self._loop, name="astrai-scheduler", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Accept ``task`` or refuse it now.

        Raises:
            EngineUnavailableError: draining, shut down or dead.
            QueueFullError: ``max_queue`` tasks wait already.
        """
        with self._lock:
            if self._fault is not None:
                raise EngineUnavailableError(f"the engine is dead: {self._fault}")
            if self._is_stopping or self._is_draining:
                raise EngineUnavailableError("the engine is shutting down")
            depth = self.num_waiting
            if depth >= self._max_queue:
                rounds = 1 + depth // self._max_batch_size
                raise QueueFullError(depth, max(1.0, self.stats.task_s * rounds))
            self._inbox.append(task)
            self._num_open += 1
            self.stats.total_tasks += 1
            self._wake()

    def cancel(self, task: Task) -> None:
        """End ``task`` within one step."""
        with self._lock:
            task.is_cancelled = True
            self._wake()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new tasks and wait for the accepted ones; False when some remain after ``timeout_s``."""
        with self._lock:
            self._is_draining = True
            self._lock.wait_for(lambda: self._num_open == 0 or not self.is_alive, timeout_s)
            return self._num_open == 0

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop the loop after the current step; every open task ends as cancelled."""
        with self._lock:
            self._is_stopping = True
            self._wake()
        if self._thread is None:
            self._end_all("cancelled")
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _wake(self) -> None:
        self._is_awake = True
        self._lock.notify_all()

    # Scheduler thread

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                started = time.perf_counter()
                self._try_step()
                self.stats.record_step(time.perf_counter() - started)
        except BaseException as error:
            self._fault = error
            raise
        finally:
            self._end_all("error" if self._fault else "cancelled", self._fault)

    def _wait_for_work(self) -> bool:
        """Sleep while there is nothing to do; False when the loop must end."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_awake or self._is_stopping or self._waiting or self._running)
            self._is_awake = False
            return self.is_alive

    def _try_step(self) -> None:
        """Run one step; a fault outside of any task ends the tasks at hand, too many in a row end the
        loop."""
        try:
            self.step()
        except Exception as error:
            # The loop must outlive a fault of one step.
            logger.exception("a step failed outside of any task")
            self._num_faults += 1
            if self._num_faults >= MAX_CONSECUTIVE_FAULTS:
                self._fault = error
            self._end_all("error", error)
        else:
            self._num_faults = 0

    def step(self) -> None:
        """One turn: everything that can move on moves on once."""
        self._receive()
        self._clean_up()
        self._refill()
        self._prefill()
        self._decode()
        self._clean_up()

    def _receive(self) -> None:
        while self._inbox:
            self._waiting.append(self._inbox.popleft())

    def _clean_up(self) -> None:
        """End cancelled tasks; record complete pages of those that ended and free what they hold."""
        for queue in (self._waiting, self._running):
            for task in queue:
                if task.is_cancelled and not task.is_done:
                    self._publish(task, task.end("cancelled"))
        ended = [task for task in (*self._running, *self._waiting) if task.is_done]
        if not ended:
            return
        now = time.monotonic()
        for task in ended:
            self._release(task)
            if task.started_at:
                self.stats.record_task(now - task.started_at)
        self._running = [task for task in self._running if not task.is_done]
        self._waiting = deque(task for task in self._waiting if not task.is_done)
        with self._lock:
            self._num_open -= len(ended)
            self._lock.notify_all()

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

    def _refill(self) -> None:
        """Start waiting tasks in order while rows and pages last."""
        while self._waiting and len(self._running) < self._max_batch_size:
            task = self._waiting[0]
            # The head of the queue is only looked at again when pages have come or gone.
            if self._running and self._blocked == (task.arrival, self._pool.num_free_pages()):
                return
            try:
                if not self._start(task):
                    self._blocked = (task.arrival, self._pool.num_free_pages())
                    return
            except Exception as error:  # noqa: BLE001 - a fault belongs to the task that causes it
                self._fail(task, error)
            self._waiting.popleft()
            self._running.append(task)

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
        reserve = len(self._running)
        if self._running and needed and needed + reserve > self._pool.num_free_pages():
            task.lease = None
            self._pool.close(lease)
            return False
        task.num_computed = lease.cached_len
        if task.num_preempted:
            self.stats.num_recomputed += max(0, task.num_lost - lease.cached_len)
        else:
            task.started_at = time.monotonic()
            task.cached_tokens = lease.cached_len
            task.handle.mark_started(task.cached_tokens)
            self._unread.append(task)
        return True

    def _fail(self, task: Task, error: Exception) -> None:
        """End one task with an error that nobody else is to feel."""
        logger.error("task %s failed", task.handle.id, exc_info=error)
        self._publish(task, task.end("error", error=error))

    def _prefill(self) -> None:
        """One ragged forward over chunks of all tasks that still have more than one token to compute."""
        self._announce()
        pending = [task for task in self._running if task.num_pending > 1 or not task.num_generated]
        if not pending:
            return
        budget = max(self._pool.page_size, self._max_step_tokens - (len(self._running) - len(pending)))
        lengths = share_budget([task.num_pending for task in pending], budget, self._pool.page_size)
        self._run([Chunk(task, length) for task, length in zip(pending, lengths, strict=True) if length])

    def _decode(self) -> None:
        """One forward for every task whose prompt is complete; each gives one row."""
        self._run([Chunk(task, 1) for task in self._running if task.num_generated and task.num_pending == 1])

    def _run(self, chunks: Sequence[Chunk]) -> None:
        for group in group_by_backend(self._reserve(chunks)):
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
                    self._preempt(max(self._running, key=lambda other: (other.is_done, other.arrival)))
                except Exception as error:  # noqa: BLE001 - a fault belongs to the task that causes it
                    self._fail(task, error)
                else:
                    granted.append(chunk)
                    break
        return [chunk for chunk in granted if chunk.task.lease is not None]

    def _preempt(self, task: Task) -> None:
        """Take everything from a running task and put it back into the queue at its place."""
        self._release(task)
        self._running.remove(task)
        self.stats.num_preemptions += 1
        task.num_preempted += 1
        task.num_lost, task.num_computed = task.num_computed, 0
        place = next((i for i, other in enumerate(self._waiting) if other.arrival > task.arrival), None)
        self._waiting.insert(len(self._waiting) if place is None else place, task)

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
        try:
            if not task.num_generated and task.lease is not None:
                self._pool.record(task.lease, task.tokens)
            event = task.accept(token) if task.max_tokens else task.end("length")
        except Exception as error:  # noqa: BLE001 - a fault belongs to the task that causes it
            self._fail(task, error)
            return
        self.stats.total_tokens += task.max_tokens > 0
        self._publish(task, event)

    def _publish(self, task: Task, event: TokenEvent) -> None:
        """Post an event; readers on an event loop are woken together by ``_announce``."""
        task.handle.post(task.call_back(event))
        self._unread.append(task)

    def _announce(self) -> None:
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        orphans = {id(handle) for handle in wake_readers([task.handle for task in unread])}
        for task in unread:
            if id(task.handle) in orphans:
                task.is_cancelled = True

    def _end_all(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End every task; the pool gets everything back."""
        self._receive()
        tasks = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
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
        with self._lock:
            self._num_open -= len(tasks)
            self._lock.notify_all()
