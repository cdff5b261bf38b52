"""What comes back from a task: events, the handle that delivers them, and the collector behind
``generate``."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Literal, Protocol

import attrs

from astrai_triton.engine.params import SamplingParams
from astrai_triton.errors import EngineUnavailableError, TaskError


class TextDecoder(Protocol):
    """Turns a stream of token ids into whole characters."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


logger = logging.getLogger("astrai.engine")

FinishReason = Literal["stop", "length", "cancelled", "error"]


@attrs.frozen
class TokenLogprob:
    """How likely a token was, under the distribution before penalties, bias, grammar and temperature."""

    token_id: int
    logprob: float
    """Natural log; finite, never below -9999.0."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their ``logprob``, most likely first, ties lower id first; as many as were
    asked for."""
    offset: int = 0
    """Characters of the answer's decoded text, stop string included, before this token's text."""


@attrs.frozen(kw_only=True)
class TokenEvent:
    """One sampled token, or the end of a task. The last event of a task, and no other, has a finish
    reason."""

    token_id: int | None = None
    """None where the task ended without a new token (cancel, error, ``max_tokens=0``)."""
    text: str = ""
    """Whole characters this token released; never part of a stop string."""
    logprob: float | None = None
    """Of this event's own token, as ``TokenLogprob.logprob``; None unless asked for."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Entries of the tokens whose text, up to its end, has been released by now. Held back together with the
    text. A token whose text begins before a stop string has one, one whose text begins later has none, nor
    has a stop token. Joined over all events of a task: one entry a token, in order."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """In the first event only, where asked for: one entry a prompt token; None for the first, which nothing
    predicts."""
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    """The stop string that ended the answer."""
    error: BaseException | None = None
    """With finish reason ``error``."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    completion_tokens: int = 0
    """Tokens sampled so far, the stop token included."""


class TaskHandle:
    """The caller's end of one task. Events are delivered exactly once, to one reader.

    Safe to use from any thread; the asynchronous readers belong to one event loop.
    """

    def __init__(
        self, task_id: str, prompt_len: int, params: SamplingParams, request_cancel: Callable[[], None]
    ) -> None:
        self.id = task_id
        self.prompt_len = prompt_len
        self.params = params
        self.cached_tokens = 0
        self._request_cancel = request_cancel
        self._events: deque[TokenEvent | int] = deque()
        """What was posted and not read. An int is a sampled token and no more."""
        self._decoder: TextDecoder | None = None
        self._num_tokens = 0
        self._fault: Exception | None = None
        """Of the decoder, not told yet."""
        self._has_ended = False
        self._has_started = False
        self._ready: threading.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_ready: Callable[[], bool] | None = None
        self._on_events: Callable[[], None] | None = None
        self._is_complete = False

    def cancel(self) -> None:
        """End the task within one step; its last event says ``cancelled``. A finished task stays as it is."""
        self._request_cancel()

    def iter_events(self) -> Iterator[TokenEvent]:
        """Yield events until the last one; blocks the thread in between."""
        # Made known before the queue is looked at: whoever posts after that look will set it.
        ready = self._ready = threading.Event()
        while True:
            for event in self.take():
                yield event
                if event.finish_reason is not None:
                    return
            ready.wait()
            ready.clear()

    def take(self) -> list[TokenEvent]:
        """Events at hand, without waiting."""
        events: list[TokenEvent] = []
        fault, self._fault = self._fault, None
        if fault is not None and not self._has_ended:
            events.append(self._fail(fault))
        for _ in range(len(self._events)):
            posted = self._events.popleft()
            if self._has_ended:
                continue
            try:
                event = self._read(posted)
            except Exception as error:  # noqa: BLE001 - of the decoder; it ends this task and no other
                event = self._fail(error)
            events.append(event)
            self._has_ended = event.finish_reason is not None
        return events

    def take_texts(self) -> list[str]:
        """Texts of the leading events at hand that are a token and no more; the quick way through a stream.

        It ends before an event that says more, and before a token whose text cannot be decoded; ``take`` has
        those.
        """
        events, texts = self._events, list[str]()
        if self._decoder is None or self._has_ended or self._fault is not None:
            return texts
        push = self._decoder.push
        while events:
            posted = events[0]
            if not isinstance(posted, int):
                break
            events.popleft()
            try:
                texts.append(push(posted))
            except Exception as error:  # noqa: BLE001 - take() tells it
                self._fault = error
                break
        self._num_tokens += len(texts)
        return texts

    @property
    def has_events(self) -> bool:
        """Whether ``take`` would return something."""
        return bool(self._events) or self._fault is not None

    def _read(self, posted: TokenEvent | int) -> TokenEvent:
        """The event that was posted, with its text if that is left to this side."""
        decoder = self._decoder
        if isinstance(posted, int):
            assert decoder is not None
            self._num_tokens += 1
            return TokenEvent(
                token_id=posted,
                text=decoder.push(posted),
                cached_tokens=self.cached_tokens,
                completion_tokens=self._num_tokens,
            )
        self._num_tokens = posted.completion_tokens
        if decoder is None or posted.token_id is None:
            return posted
        text = "" if posted.finish_reason == "stop" else decoder.push(posted.token_id)
        if posted.finish_reason is not None:
            text += decoder.flush()
        return attrs.evolve(posted, text=text)

    def _fail(self, error: Exception) -> TokenEvent:
        """The end of a task whose text cannot be decoded, whatever the scheduler makes of it."""
        logger.error("the text of task %s could not be decoded", self.id, exc_info=error)
        self.cancel()
        self._has_ended = True
        return TokenEvent(
            finish_reason="error",
            error=error,
            cached_tokens=self.cached_tokens,
            completion_tokens=self._num_tokens,
        )

    async def events(self) -> AsyncIterator[TokenEvent]:
        """Yield events until the last one. Leaving early does not cancel the task."""
        async for batch in self.batches():
            for event in batch:
                yield event

    async def batches(self) -> AsyncGenerator[list[TokenEvent], None]:
        """Yield all events at hand, again and again, until the last one: a slow reader gets longer lists."""
        while True:
            await self._wait(lambda: bool(self._events))
            batch = self.take()
            yield batch
            if batch[-1].finish_reason is not None:
                return

    async def finished(self) -> list[TokenEvent]:
        """Wait for the last event and return all that have not been read."""
        await self._wait(lambda: self._is_complete)
        return self.take()

    def attach(self, on_events: Callable[[], None] | None) -> None:
        """Have ``on_events`` called in this event loop whenever events may be at hand; None ends that.

        It is called at once, too, for those at hand now.
        """
        self._loop = asyncio.get_running_loop()
        self._on_events = on_events
        if on_events is not None:
            on_events()

    async def started(self) -> None:
        """Wait until prefill has begun, when ``cached_tokens`` is known.

        Raises:
            TaskError: the task ended with an error before that (its cause is the error itself).
        """
        await self._wait(lambda: self._has_started or bool(self._events))
        first = None if self._has_started else self._events[0]
        if isinstance(first, TokenEvent) and first.finish_reason == "error":
            raise TaskError(f"task {self.id} failed before it began") from first.error

    async def _wait(self, is_ready: Callable[[], bool]) -> None:
        # The loop is published before the queue is looked at: whoever posts after that look will wake this
        # loop.
        self._loop = asyncio.get_running_loop()
        while not is_ready():
            self._waiter, self._is_ready = self._loop.create_future(), is_ready
            try:
                await self._waiter
            finally:
                self._waiter = None

    @property
    def has_started(self) -> bool:
        """Whether prefill has begun."""
        return self._has_started

    def mark_started(self, cached_tokens: int) -> None:
        """Scheduler: prefill begins now."""
        self.cached_tokens = cached_tokens
        self._has_started = True

    def decode_with(self, decoder: TextDecoder) -> None:
        """Scheduler: events come without text, and the reader decodes it; before anything is posted."""
        self._decoder = decoder

    def post(self, event: TokenEvent) -> None:
        """Scheduler: append an event; ``wake_readers`` tells the reader."""
        self._events.append(event)
        if event.finish_reason is not None:
            self._is_complete = True

    @property
    def post_token(self) -> Callable[[int], None]:
        """Scheduler: appends a sampled token that is not the last; ``wake_readers`` tells the reader."""
        return self._events.append

    def _wake(self) -> None:
        if self._on_events is not None:
            self._on_events()
        elif self._waiter is not None and not self._waiter.done():
            assert self._is_ready is not None
            if self._is_ready():
                self._waiter.set_result(None)


def _wake_all(handles: Sequence[TaskHandle]) -> None:
    for handle in handles:
        handle._wake()


def wake_readers(handles: Sequence[TaskHandle]) -> list[TaskHandle]:
    """Tell the readers of ``handles``; asynchronous ones with one call per event loop.

    Returns:
        The handles whose event loop is closed: nobody will ever read them.
    """
    orphans: list[TaskHandle] = []
    for ready in {handle._ready for handle in handles}:
        if ready is not None:
            ready.set()
    loops = {handle._loop for handle in handles}
    loops.discard(None)
    for loop in loops:
        waiting = handles if len(loops) == 1 else [handle for handle in handles if handle._loop is loop]
        try:
            assert loop is not None
            loop.call_soon_threadsafe(_wake_all, tuple(waiting))
        except RuntimeError:
            orphans.extend(handle for handle in waiting if handle._loop is loop)
    return orphans


class GenerateResult:
    """Collects the answers of one ``generate`` call.

    Whole answers wait on a condition (``wait_completion``), streams on an event (``wait``, then ``pop``).

    Args:
        num_prompts: answers expected.
        callback: called with each piece of text, in the scheduler's thread; what it raises ends that task.
    """

    def __init__(self, num_prompts: int, callback: Callable[[str], None] | None = None) -> None:
        self._callback = callback
        self._pieces: list[list[str]] = [[] for _ in range(num_prompts)]
        self._unread: deque[tuple[int, str]] = deque()
        self._errors: list[BaseException | None] = [None] * num_prompts
        self._num_open = num_prompts
        self._completed = threading.Condition()
        self._readable = threading.Event()
        if num_prompts == 0:
            self._readable.set()

    def push(self, index: int, event: TokenEvent) -> None:
        """Take one event of answer ``index``; called in the scheduler's thread."""
        if event.text:
            if self._callback is not None:
                self._callback(event.text)
            self._pieces[index].append(event.text)
            self._unread.append((index, event.text))
        if event.finish_reason is not None:
            error = event.error
            if event.finish_reason == "cancelled":
                # Nobody but the engine itself can cancel these: a shorter text must not pass for the answer.
                error = EngineUnavailableError("the engine shut down before the answer was complete")
            with self._completed:
                self._errors[index] = error
                self._num_open -= 1
                self._completed.notify_all()
        if event.text or event.finish_reason is not None:
            self._readable.set()

    @property
    def is_complete(self) -> bool:
        """Whether every answer has ended."""
        return self._num_open == 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until there is text to ``pop`` or everything has ended; False on time-out."""
        return self._readable.wait(timeout_s)

    def pop(self) -> list[tuple[int, str]]:
        """Take the pieces that arrived since the last call, as ``(answer index, text)``.

        Raises:
            TaskError: an answer ended with an error (its cause), once all text before it was taken.
        """
        self._readable.clear()
        is_complete = self.is_complete
        pieces = [self._unread.popleft() for _ in range(len(self._unread))]
        if is_complete:
            self._readable.set()
            if not pieces:
                self._raise_first_error()
        return pieces

    def wait_completion(self, timeout_s: float | None = None) -> list[str]:
        """Block until every answer has ended and return them in the order of the prompts.

        Raises:
            TimeoutError: not within ``timeout_s`` seconds.
            TaskError: an answer ended with an error (its cause).
        """
        with self._completed:
            if not self._completed.wait_for(lambda: self._num_open == 0, timeout_s):
                raise TimeoutError(f"{self._num_open} answers still open after {timeout_s} s")
        self._raise_first_error()
        return ["".join(pieces) for pieces in self._pieces]

    def _raise_first_error(self) -> None:
        for index, error in enumerate(self._errors):
            if error is not None:
                raise TaskError(f"answer {index} failed: {error}") from error
