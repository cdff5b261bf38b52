"""One step of continuous batching, and the tasks it moves. The same input gives the same steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import attrs

from astrai_triton.cache import PagePool
from astrai_triton.engine.admission import Admission
from astrai_triton.engine.batch import DecodeBatch
from astrai_triton.engine.budget import POLICIES, PolicyName
from astrai_triton.engine.observer import Observer
from astrai_triton.engine.queue import MAX_OVERTAKEN
from astrai_triton.engine.result import FinishReason, TokenEvent, wake_readers
from astrai_triton.engine.runner import Chunk, ModelRunner, Outcome, group_by_backend
from astrai_triton.engine.sampling import SampledToken
from astrai_triton.engine.scoring import MAX_SCORED_ROWS
from astrai_triton.engine.stats import StepStats
from astrai_triton.engine.task import Task
from astrai_triton.errors import OutOfPagesError

logger = logging.getLogger("astrai.engine")


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
        self._prefilling: list[Task] = []
        self._batches: list[DecodeBatch] | None = None
        """The running tasks that decode; None: they are not what they were."""
        self._has_ended = False
        self._admission = Admission(pool, stats, self._fail, max_overtaken)
        self.running: list[Task] = []

    def step(self, arrived: Sequence[Task] = (), cancelled: Sequence[Task] = ()) -> int:
        """One turn: everything that can move on moves on once.

        Args:
            arrived: new tasks, in the order of their arrival numbers.
            cancelled: tasks to end; those that have ended already stay as they are.

        Returns:
            How many tasks ended and were cleaned up.
        """
        if arrived:
            self._admission.receive(arrived, self.running)
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
    ) -> None:
        """End every task, those that just arrived too; the pool gets everything back."""
        tasks = [*self.running, *self._admission.waiting.clear(), *arrived]
        self.running.clear()
        self._prefilling.clear()
        self._batches = None
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

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.num_waiting or self._orphaned)

    @property
    def num_waiting(self) -> int:
        """Tasks that were received and do not run."""
        return len(self._admission.waiting)

    # In and out

    def _take_orphans(self) -> list[Task]:
        orphans, self._orphaned = self._orphaned, []
        return orphans

    def _clean_up(self) -> int:
        """Record complete pages of tasks that ended and free what they hold."""
        if not self._has_ended:
            return 0
        self._has_ended, self._batches = False, None
        ended = [task for task in self.running if task.is_done]
        self.running = [task for task in self.running if not task.is_done]
        self._prefilling = [task for task in self._prefilling if not task.is_done]
        ended += self._admission.waiting.remove_done()
        now = time.monotonic() if ended else 0.0
        for task in ended:
            self._release(task)
            self._admission.charge(task)
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
        if event.finish_reason is not None:
            self._has_ended = True
            self._stats.ended[event.finish_reason] += 1
            if self._observer is not None:
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

    # Start and preempt

    def _refill(self) -> None:
        """Start waiting tasks while rows and pages last."""
        self._admission.release_forks()
        while len(self.running) < self._max_batch_size:
            task = self._admission.start_next(self.running)
            if task is None:
                return
            self.running.append(task)
            self._prefilling.append(task)
            self._unread.append(task)

    def _preempt(self, task: Task) -> None:
        """Take everything from a running task and put it back into the queue at its place."""
        if self._observer is not None:
            self._observer.preempt(task)
        self._admission.charge(task)
        self._release(task)
        self.running.remove(task)
        if task.is_decoding:
            self._batches = None
        else:
            self._prefilling.remove(task)
        self._stats.num_preemptions += 1
        task.num_preempted += 1
        task.num_lost, task.num_prefilled, task.is_decoding = task.num_computed, 0, False
        self._admission.restore(task)

    # Compute

    def _prefill(self) -> None:
        """One ragged forward over chunks of all tasks that still have more than one token to compute."""
        self._announce()
        pending = self._prefilling
        if not pending:
            return
        page_size = self._pool.page_size
        budget = max(page_size, self._max_step_tokens - (len(self.running) - len(pending)))
        lengths = self._share([task.num_pending for task in pending], budget, page_size)
        self._limit_scored(pending, lengths)
        self._run([Chunk(task, length) for task, length in zip(pending, lengths, strict=True) if length])
        if any(task.is_decoding for task in pending):
            self._prefilling = [task for task in self._prefilling if not task.is_decoding]
            self._batches = None

    def _limit_scored(self, pending: Sequence[Task], lengths: list[int]) -> None:
        """Cut the chunks of prompts that are being scored: each of their rows gives a row of logits."""
        scored = [i for i, task in enumerate(pending) if lengths[i] and task.is_scoring]
        if scored:
            page_size = min(self._pool.page_size, MAX_SCORED_ROWS)
            limits = self._share([lengths[i] for i in scored], MAX_SCORED_ROWS, page_size)
            for i, limit in zip(scored, limits, strict=True):
                lengths[i] = limit

    def _decode(self) -> None:
        """One forward for every task whose prompt is complete; each gives one row."""
        if self._batches is None:
            chunks = [Chunk(task, 1) for task in self.running if task.is_decoding and not task.is_done]
            self._batches = [
                DecodeBatch([chunk.task for chunk in group], self._runner.vocab_size, self._runner.device)
                for group in group_by_backend(chunks)
            ]
        batches = self._batches
        if all(self._grow(batch) for batch in batches):
            for batch in batches:
                self._run_batch(batch)
        else:
            # Somebody has to make room.
            self._batches = None
            self._run([Chunk(task, 1) for batch in batches for task in batch.tasks if task.is_decoding])
        self._announce()

    def _grow(self, batch: DecodeBatch) -> bool:
        """Give every task a slot for its next token; False if they do not all get one just like that."""
        growing = batch.find_growing()
        if not growing:
            return True
        try:
            for i in growing:
                self._pool.extend(batch.leases[i], len(batch.tasks[i].tokens))
        except OutOfPagesError:
            return False
        except Exception:
            # They are tried one by one now; a fault that is gone by then shows here alone.
            logger.warning("slots for %d tasks could not be taken", len(growing), exc_info=True)
            return False
        batch.note_growth(growing)
        return True

    def _run_batch(self, batch: DecodeBatch) -> None:
        if self._observer is not None:
            self._observer.run([Chunk(task, 1) for task in batch.tasks])
        try:
            token_ids, ids, sampled = self._runner.decode(batch)
        except Exception as error:  # noqa: BLE001 - a fault belongs to the task that causes it
            self._batches = None
            for outcome in self._isolate([Chunk(task, 1) for task in batch.tasks], error):
                self._advance(outcome)
            return
        if sampled is None and self._observer is None and batch.advance(ids):
            self._stats.total_tokens += len(ids)
            self._unread += batch.tasks
        else:
            tokens = sampled if sampled is not None else map(SampledToken, ids)
            for task, token in zip(batch.tasks, tokens, strict=True):
                self._accept(task, token)
        batch.step_forward(token_ids)

    def _run(self, chunks: Sequence[Chunk]) -> None:
        for group in group_by_backend(self._reserve(chunks)):
            if self._observer is not None:
                self._observer.run(group)
            self._forward_and_advance(group)
        self._announce()

    def _forward_and_advance(self, chunks: Sequence[Chunk]) -> None:
        for outcome in self._forward(chunks):
            self._advance(outcome)

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

    def _forward(self, chunks: Sequence[Chunk]) -> Iterator[Outcome]:
        """Run ``chunks`` together; if that fails, one by one."""
        try:
            outcomes = self._runner.run(chunks)
        except Exception as error:  # noqa: BLE001 - a fault belongs to the task that causes it
            yield from self._isolate(chunks, error)
        else:
            yield from outcomes

    def _isolate(self, chunks: Sequence[Chunk], error: Exception) -> Iterator[Outcome]:
        """Run one by one what failed together, so that only those that fail alone end with an error."""
        if len(chunks) == 1:
            self._fail(chunks[0].task, error)
            return
        logger.warning("a forward of %d tasks failed; each runs alone now", len(chunks), exc_info=error)
        for chunk in chunks:
            yield from self._forward([chunk])

    def _advance(self, outcome: Outcome) -> None:
        """Take note that a chunk has run, and of what came of it."""
        task = outcome.chunk.task
        if outcome.scores and task.prompt_scores is not None:
            task.prompt_scores.add(outcome.scores)
        if not task.is_decoding:
            task.num_prefilled = outcome.chunk.end
        if outcome.token is not None:
            self._accept(task, outcome.token)

    def _accept(self, task: Task, token: SampledToken) -> None:
        """Append a sampled token to its task and tell the reader."""
        if self._observer is not None:
            self._observer.sample(task, token.token_id)
        is_first = not task.num_generated
        try:
            if is_first and task.lease is not None:
                self._pool.record(task.lease, task.tokens)
            event = task.accept(token) if task.max_tokens else task.end("length")
            if is_first and task.prompt_scores is not None:
                event = attrs.evolve(event, prompt_logprobs=tuple(task.prompt_scores.entries))
        except Exception as error:  # noqa: BLE001 - a fault belongs to the task that causes it
            self._fail(task, error)
            return
        task.is_decoding = task.num_generated > 0
        self._stats.total_tokens += task.max_tokens > 0
        self._publish(task, event)
