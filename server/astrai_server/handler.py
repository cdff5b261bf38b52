"""One request of any protocol: prepare, submit, and turn the engine's events into bytes."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import attrs

from astrai_server.builder import Context, Outcome, ResponseBuilder, Usage
from astrai_server.problem import DeadlineError
from astrai_server.stream import FrameStream
from astrai_server.wire import InvalidRequestError, Issue
from astrai_triton.errors import EngineUnavailableError, TaskError

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine, TaskHandle, TokenEvent

logger = logging.getLogger("astrai.server")


@attrs.define
class Report:
    """What the log says about one request."""

    started: float = attrs.field(factory=time.perf_counter)
    first_token: float | None = None
    last_token: float = 0.0
    prompt_tokens: int | None = None
    """None until the request is admitted."""
    last_event: TokenEvent | None = None
    num_tokens: int = 0
    """Tokens that the answer has so far."""
    finish: str | None = None

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        event = self.last_event
        return Usage(
            prompt_tokens=self.prompt_tokens or 0,
            cached_tokens=event.cached_tokens if event is not None else 0,
            completion_tokens=self.num_tokens,
        )

    def __str__(self) -> str:
        if self.prompt_tokens is None:
            return ""
        usage = self.usage
        text = f" finish={self.finish or 'none'} in={usage.prompt_tokens} ({usage.cached_tokens} cached)"
        text += f" out={usage.completion_tokens}"
        if self.first_token is not None:
            text += f" ttft={(self.first_token - self.started) * 1e3:.1f}ms"
            if usage.completion_tokens > 1:
                gap = (self.last_token - self.first_token) / (usage.completion_tokens - 1)
                text += f" itl={gap * 1e3:.2f}ms"
        return text


class ProtocolHandler:
    """Answers one request. Whoever calls ``handle`` must call ``close`` in the end, however that comes about.

    Args:
        request: body of the request, of the class the builder asks for.
        engine: runs the task.
        builder: the protocol.
        request_id: id for logs and error frames.
        timeout_s: seconds the answer may take; None is no limit.
        key: name of the API key, which shares the engine evenly with others.
        salt: requests of different salts share no cached prefix.
    """

    def __init__(
        self,
        request: Any,
        engine: InferenceEngine,
        builder: ResponseBuilder[Any, Any],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        key: str | None = None,
        salt: str | None = None,
    ) -> None:
        self._request = request
        self._engine = engine
        self._builder = builder
        self._request_id = request_id
        self._timeout_s = timeout_s
        self._key = key
        self._salt = salt
        self._task: TaskHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_late = False
        self._has_ended = False
        self.report = Report()

    async def handle(self) -> bytes | FrameStream:
        """Admit the request.

        Returns:
            The whole answer, or the frames of a stream.

        Raises:
            InvalidRequestError, AstraiError: the request was refused, or failed before its first byte.
            DeadlineError: the answer took longer than ``timeout_s``.
        """
        # Rendering and tokenising a long conversation takes longer than a frame of another client may wait.
        context = await asyncio.to_thread(self._builder.prepare, self._request, self._engine)
        task = self._submit(context)
        if not context.is_stream:
            return self._builder.format_response(context, await self._collect(task))
        if self._builder.awaits_prefill:
            await task.started()
            self._raise_if_late()
        return self._stream(context, task)

    def close(self) -> None:
        """Cancel what still runs."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and not self._has_ended:
            self._task.cancel()

    def _submit(self, context: Context) -> TaskHandle:
        if self._timeout_s is not None:
            left = self._timeout_s - (time.perf_counter() - self.report.started)
            self._timer = asyncio.get_running_loop().call_later(max(0.0, left), self._expire)
        try:
            self._task = self._engine.submit(
                context.prompt_ids,
                context.params,
                request_id=self._request_id or None,
                key=self._key,
                salt=self._salt,
            )
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(Issue((), str(error))) from error
        self.report.prompt_tokens = self._task.prompt_len
        return self._task

    def _expire(self) -> None:
        self._is_late = True
        if self._task is not None:
            self._task.cancel()

    def _raise_if_late(self) -> None:
        if self._is_late:
            raise DeadlineError(f"the answer took longer than {self._timeout_s:g} s")

    async def _collect(self, task: TaskHandle) -> Outcome:
        events = await task.finished()
        self._note(events[-1])
        return self._conclude(task, events[-1], "".join(event.text for event in events))

    def _stream(self, context: Context, task: TaskHandle) -> FrameStream:
        return FrameStream(
            context,
            task,
            self._builder,
            note=self._note,
            note_tokens=self._note_tokens,
            conclude=lambda last: self._conclude(task, last),
            give_up=self._give_up,
            request_id=self._request_id,
        )

    def _give_up(self) -> None:
        self.report.finish = self.report.finish or "error"

    def _note_tokens(self, count: int) -> None:
        report = self.report
        report.num_tokens += count
        report.last_token = time.perf_counter()
        if report.first_token is None:
            report.first_token = report.last_token

    def _note(self, last: TokenEvent) -> None:
        report = self.report
        report.last_event = last
        report.num_tokens = last.completion_tokens
        report.last_token = time.perf_counter()
        if report.first_token is None:
            report.first_token = report.last_token

    def _conclude(self, task: TaskHandle, last: TokenEvent, text: str = "") -> Outcome:
        """The end of an answer; raises where that is no answer."""
        self._has_ended = True
        self.report.finish = last.finish_reason
        if last.finish_reason == "cancelled":
            self._raise_if_late()
            raise EngineUnavailableError("the server ended this request because it is shutting down")
        if last.finish_reason == "error":
            raise last.error or TaskError(f"task {task.id} failed")
        assert last.finish_reason is not None
        return Outcome(
            finish_reason=last.finish_reason,
            stop_string=last.stop_string,
            usage=self.report.usage,
            text=text,
        )
