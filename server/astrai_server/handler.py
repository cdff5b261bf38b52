"""One request of any protocol: prepare, submit, and turn the engine's events into bytes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from astrai_server.builder import Choice, Context, ResponseBuilder
from astrai_server.choice import Choices
from astrai_server.report import Report
from astrai_server.stream import FrameStream
from astrai_server.wire import InvalidRequestError, Issue

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine


class ProtocolHandler:
    """Answers one request. Whoever calls ``handle`` must call ``close`` in the end, however that comes about.

    Args:
        request: body of the request, of the class the builder asks for.
        engine: runs the tasks.
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
        self._choices: Choices | None = None
        self._timer: asyncio.TimerHandle | None = None
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
        choices = self._submit(context)
        if not context.is_stream:
            ended = await _collect(choices)
            usage, format_response = self.report.usage, self._builder.format_response
            if not context.params.logprobs:
                return format_response(context, ended, usage)
            # Tens of thousands of alternatives take longer than a frame of another client may wait.
            return await asyncio.to_thread(format_response, context, ended, usage)
        if self._builder.awaits_prefill:
            await choices.wait_for_prefill()
        return FrameStream(context, choices, self._builder, request_id=self._request_id)

    def close(self) -> None:
        """Cancel what still runs."""
        if self._timer is not None:
            self._timer.cancel()
        if self._choices is not None:
            self._choices.cancel()

    def _submit(self, context: Context) -> Choices:
        try:
            tasks = self._engine.submit_many(
                context.prompts,
                context.params,
                n=context.num_choices,
                request_id=self._request_id or None,
                key=self._key,
                salt=self._salt,
            )
        except (TypeError, ValueError) as error:
            # Of several choices, more than the queue can hold is all that may still be wrong.
            path = ("n",) if context.num_choices > 1 else ()
            raise InvalidRequestError(Issue(path, str(error))) from error
        choices = self._choices = Choices(tasks, context, self.report)
        if self._timeout_s is not None:
            left = self._timeout_s - (time.perf_counter() - self.report.started)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, left), choices.expire, self._timeout_s)
        return choices


async def _collect(choices: Choices) -> list[Choice]:
    """All choices, whole; the first that fails fails them all."""
    if len(choices.readers) == 1:
        return [await choices.collect(choices.readers[0])]
    collecting = [asyncio.ensure_future(choices.collect(reader)) for reader in choices.readers]
    try:
        return list(await asyncio.gather(*collecting))
    finally:
        for future in collecting:
            future.cancel()
