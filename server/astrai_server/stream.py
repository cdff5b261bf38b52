"""The answer to one request as a stream of frames: pulled, or pushed to the socket as events come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from astrai_server.builder import Context, Outcome, ResponseBuilder, Usage
from astrai_server.problem import explain, is_internal

if TYPE_CHECKING:
    from astrai_triton.engine import TaskHandle, TokenEvent

logger = logging.getLogger("astrai.server")


class FrameStream:
    """Turns the events of a task into bytes; a failure of the engine becomes the last frame.

    Either iterate over it, or ``push`` it. Frames of all events at hand go together, so that a slow client
    costs fewer writes.

    Args:
        context: the request.
        task: what answers it.
        builder: the protocol.
        note: is told of the last event of each write.
        note_tokens: is told how many tokens a write brought that are no events.
        conclude: makes the outcome of the last event; raises where that is no answer.
        give_up: is told that the last frame is an error.
        request_id: id for logs and error frames.
    """

    def __init__(
        self,
        context: Context,
        task: TaskHandle,
        builder: ResponseBuilder[Any, Any],
        *,
        note: Callable[[TokenEvent], None],
        note_tokens: Callable[[int], None],
        conclude: Callable[[TokenEvent], Outcome],
        give_up: Callable[[], None],
        request_id: str,
    ) -> None:
        self._context = context
        self._task = task
        self._builder = builder
        self._note = note
        self._note_tokens = note_tokens
        self._conclude = conclude
        self._give_up = give_up
        self._request_id = request_id
        self.is_done = False
        """Whether the last frame was made."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """What each write should carry."""
        yield self.start()
        async for events in self._task.batches():
            data = self.encode(events)
            if data:
                yield data
            if self.is_done:
                return

    async def push(
        self,
        write: Callable[[bytes], bool],
        wait_for_room: Callable[[], Coroutine[Any, Any, bool]],
    ) -> bool:
        """Write all that follows ``start`` as events come, without a task switch per token.

        Args:
            write: takes bytes at once, and says whether the reader is behind, so that no more should follow.
            wait_for_room: waits until it has caught up; False gives it up. Events wait in the task meanwhile.

        Returns:
            False if the reader was given up.
        """
        loop = asyncio.get_running_loop()
        while not self.is_done:
            stopped: asyncio.Future[None] = loop.create_future()

            def advance(stopped: asyncio.Future[None] = stopped) -> None:
                if stopped.done():
                    return
                data = self._encode_at_hand()
                if (data and write(data)) or self.is_done:
                    stopped.set_result(None)

            self._task.attach(advance)
            try:
                await stopped
            finally:
                self._task.attach(None)
            if not self.is_done and not await wait_for_room():
                return False
        return True

    def _encode_at_hand(self) -> bytes:
        """Frames of what the task has posted."""
        task = self._task
        texts = task.take_texts()
        data = self._encode_texts(texts) if texts else b""
        if task.has_events and not self.is_done:
            data += self.encode(task.take())
        return data

    def _encode_texts(self, texts: Sequence[str]) -> bytes:
        try:
            self._note_tokens(len(texts))
            context, format_chunk = self._context, self._builder.format_chunk
            if len(texts) == 1:
                return format_chunk(context, texts[0]) if texts[0] else b""
            return b"".join([format_chunk(context, text) for text in texts if text])
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the stream ends
            return self._end_with(error)

    def start(self) -> bytes:
        """What stands before the first token."""
        task = self._task
        try:
            usage = Usage(prompt_tokens=task.prompt_len, cached_tokens=task.cached_tokens)
            return self._builder.format_stream_start(self._context, usage)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the stream ends
            return self._end_with(error)

    def encode(self, events: Sequence[TokenEvent]) -> bytes:
        """Frames of events that come next, at least one."""
        if self.is_done:
            return b""
        try:
            last = events[-1]
            self._note(last)
            context, format_chunk = self._context, self._builder.format_chunk
            frames = [format_chunk(context, event.text) for event in events if event.text]
            if last.finish_reason is not None:
                frames.append(self._builder.format_stream_end(context, self._conclude(last)))
                self.is_done = True
            return b"".join(frames)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the stream ends
            return self._end_with(error)

    def _end_with(self, error: Exception) -> bytes:
        if is_internal(error):
            logger.exception("%s failed in mid-stream", self._request_id)
        self.is_done = True
        self._give_up()
        return self._builder.format_stream_error(explain(error), self._request_id)
