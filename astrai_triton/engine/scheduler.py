"""The thread that steps: takes tasks from any thread, survives faults of a step, drains and stops."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from astrai_triton.cache import PagePool
from astrai_triton.engine.budget import PolicyName
from astrai_triton.engine.observer import Observer
from astrai_triton.engine.queue import MAX_OVERTAKEN
from astrai_triton.engine.runner import ModelRunner
from astrai_triton.engine.stats import StepStats
from astrai_triton.engine.stepper import Stepper
from astrai_triton.engine.task import Task
from astrai_triton.errors import EngineUnavailableError, QueueFullError

logger = logging.getLogger("astrai.engine")

_T = TypeVar("_T")

MAX_CONSECUTIVE_FAULTS = 3
"""Steps in a row that may fail outside of any task before the scheduler gives up."""


class InferenceScheduler:
    """Continuous batching over a paged KV pool, in a daemon thread.

    What other threads ask for waits in inboxes until the next step begins; ``Stepper`` does the rest. So the
    steps are a function of what was in the inboxes when each began.

    Args:
        runner: runs the model.
        pool: owner of the KV cache.
        max_batch_size: tasks that may run at once.
        max_step_tokens: rows of one step; decodes count first, the rest goes to prefill chunks.
        max_queue: tasks that may wait.
        policy: how prompts share a step; see ``budget``.
        max_overtaken: bound of overtaking; see ``WaitingQueue``.
        observer: is told what every step does.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: PagePool,
        *,
        max_batch_size: int,
        max_step_tokens: int,
        max_queue: int,
        policy: PolicyName = "budget",
        max_overtaken: int = MAX_OVERTAKEN,
        observer: Observer | None = None,
    ) -> None:
        self.stats = StepStats()
        self._stepper = Stepper(
            runner,
            pool,
            self.stats,
            max_batch_size=max_batch_size,
            max_step_tokens=max_step_tokens,
            policy=policy,
            max_overtaken=max_overtaken,
            observer=observer,
        )
        self._max_batch_size = max_batch_size
        self._max_queue = max_queue
        self._arrived: deque[Task] = deque()
        self._cancelled: deque[Task] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._num_open = 0
        self._lock = threading.Condition()
        self._is_awake = False
        self._is_stopping = False
        self._is_draining = False
        self._fault: BaseException | None = None
        self._num_faults = 0
        self._thread: threading.Thread | None = None

    # Any thread

    @property
    def is_alive(self) -> bool:
        """Whether tasks are accepted or could be after a drain is over."""
        return self._fault is None and not self._is_stopping

    @property
    def num_waiting(self) -> int:
        """Tasks that were accepted and do not run yet."""
        return len(self._arrived) + self._stepper.num_waiting

    @property
    def running(self) -> Sequence[Task]:
        """Tasks that hold a row of the pool; changes with every step."""
        return self._stepper.running

    def start(self) -> None:
        """Start the step loop in a daemon thread."""
        self._thread = threading.Thread(target=self._loop, name="astrai-scheduler", daemon=True)
        self._thread.start()

    def submit(self, tasks: Sequence[Task]) -> None:
        """Accept ``tasks`` or refuse them now, all or none.

        Args:
            tasks: in the order of their arrival numbers, later than any before; a leader comes with its
                followers.

        Raises:
            EngineUnavailableError: draining, shut down or dead.
            QueueFullError: more than ``max_queue`` tasks would wait.
        """
        with self._lock:
            if self._fault is not None:
                raise EngineUnavailableError(f"the engine is dead: {self._fault}")
            if self._is_stopping or self._is_draining:
                raise EngineUnavailableError("the engine is shutting down")
            depth = self.num_waiting
            if depth + len(tasks) > self._max_queue:
                rounds = 1 + depth // self._max_batch_size
                raise QueueFullError(depth, max(1.0, self.stats.task_s * rounds))
            self._arrived.extend(tasks)
            self._num_open += len(tasks)
            self.stats.total_tasks += len(tasks)
            self._wake()

    def cancel(self, task: Task) -> None:
        """End ``task`` within one step."""
        # Readers cancel in passing, mostly what has ended.
        if task.is_done or task.is_cancelled:
            return
        with self._lock:
            task.is_cancelled = True
            self._cancelled.append(task)
            self._wake()

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run ``function`` in the scheduler's thread before the next step, when nobody else touches the pool.

        Every task waits for it, so it must be short. What it raises is the future's.

        Raises:
            EngineUnavailableError: shut down or dead; so is the future, where that happens before its turn.
        """
        future: Future[_T] = Future()
        with self._lock:
            if not self.is_alive:
                raise EngineUnavailableError("the engine is shut down or dead")
            self._calls.append((function, future))
            self._wake()
        return future

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
            self._end_all(None)
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
            self._end_all(self._fault)

    def _wait_for_work(self) -> bool:
        """Sleep while there is nothing to do; False when the loop must end."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_awake or self._is_stopping or self._stepper.has_work)
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
            self._end_all(error)
        else:
            self._num_faults = 0

    def step(self) -> None:
        """One turn: everything that can move on moves on once."""
        self._run_calls()
        arrived: Sequence[Task] = ()
        cancelled: Sequence[Task] = ()
        if self._arrived or self._cancelled:
            # At one moment: tasks that were accepted together come together, and before they are cancelled.
            with self._lock:
                arrived, cancelled = _take_all(self._arrived), _take_all(self._cancelled)
        self._close(self._stepper.step(arrived, cancelled))

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - a fault belongs to whoever asked
                future.set_exception(error)

    def _end_all(self, error: BaseException | None) -> None:
        """End every task of the stepper, and all others where there is no next step, with ``error`` or as
        cancelled; the pool gets everything back."""
        while self._calls and not self.is_alive:
            _, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineUnavailableError("the engine was shut down"))
        arrived: list[Task] = []
        if not self.is_alive:
            # What arrived while a step failed was not in it: where there is a next step, that takes it in.
            with self._lock:
                arrived = _take_all(self._arrived)
                self._cancelled.clear()
        self._stepper.end_all("error" if error else "cancelled", error, arrived)
        with self._lock:
            # Not counted down: the step that failed may have cleaned tasks up without saying so.
            self._num_open = len(self._arrived)
            self._lock.notify_all()

    def _close(self, num_ended: int) -> None:
        if num_ended:
            with self._lock:
                self._num_open -= num_ended
                self._lock.notify_all()


def _take_all(inbox: deque[Task]) -> list[Task]:
    tasks = list(inbox)
    inbox.clear()
    return tasks
