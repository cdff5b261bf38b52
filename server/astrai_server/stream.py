"""The answer to one request as a stream of frames, pushed to the socket as events come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from astrai_server.builder import Context, ResponseBuilder
from astrai_server.choice import ChoiceReader, Choices
from astrai_server.problem import explain, is_internal

if TYPE_CHECKING:
    from astrai_server.answer import Piece
    from astrai_triton.engine import TokenEvent

logger = logging.getLogger("astrai.server")


class FrameStream:
    """Turns the events of the choices' tasks into bytes; a failure of the engine becomes the last frame.

    Frames of all events at hand go together, so that a slow client costs fewer writes.

    Args:
        context: the request.
        choices: what answers it.
        builder: the protocol.
        request_id: id for logs and error frames.
    """

    def __init__(
        self,
        context: Context,
        choices: Choices,
        builder: ResponseBuilder[Any, Any],
        *,
        request_id: str,
    ) -> None:
        self._context = context
        self._choices = choices
        self._builder = builder
        self._request_id = request_id
        self._open = choices.open_readers
        self.is_done = False
        """Whether the last frame was made."""

    def start(self) -> bytes:
        """What stands before the first token."""
        try:
            return self._builder.format_stream_start(self._context, self._choices.report.usage)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the stream ends
            return self._end_with(error)

    async def push(
        self,
        write: Callable[[bytes], bool],
        wait_for_room: Callable[[], Coroutine[Any, Any, bool]],
    ) -> bool:
        """Write all that follows ``start`` as events come, without a task switch per token.

        Args:
            write: takes bytes at once, and says whether the reader is behind, so that no more should follow.
            wait_for_room: waits until it has caught up; False gives it up. Meanwhile events wait.

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

            attached = [reader.task for reader in self._open]
            for task in attached:
                task.attach(advance)
            try:
                await stopped
            finally:
                for task in attached:
                    task.attach(None)
            if not self.is_done and not await wait_for_room():
                return False
        return True

    def _encode_at_hand(self) -> bytes:
        """Frames of what the tasks have posted."""
        if len(self._open) == 1:
            return self._encode_choice(self._open[0])
        data = b""
        for reader in tuple(self._open):
            data += self._encode_choice(reader)
            if self.is_done:
                break
        return data

    def _encode_choice(self, reader: ChoiceReader) -> bytes:
        """Frames of what one task has posted."""
        task = reader.task
        texts = task.take_texts()
        data = b""
        try:
            if texts:
                data = self._encode_texts(reader, texts)
            if task.has_events and not reader.has_ended:
                data += self._encode_events(reader, task.take())
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the stream ends
            data += self._end_with(error)
        return data

    def _encode_texts(self, reader: ChoiceReader, texts: Sequence[str]) -> bytes:
        """Frames of tokens that are text and no more."""
        if reader.parser is not None:
            return self._format(reader, self._choices.read_texts(reader, texts))
        self._choices.note_texts(reader, len(texts))
        context, format_chunk, index = self._context, self._builder.format_chunk, reader.index
        if len(texts) == 1:
            return format_chunk(context, texts[0], index) if texts[0] else b""
        return b"".join([format_chunk(context, text, index) for text in texts if text])

    def _encode_events(self, reader: ChoiceReader, events: Sequence[TokenEvent]) -> bytes:
        """Frames of events, at least one."""
        return self._format(reader, self._choices.read(reader, events))

    def _format(self, reader: ChoiceReader, pieces: Sequence[Piece]) -> bytes:
        """Frames of the pieces that come next, and of the end where it has come."""
        context, builder = self._context, self._builder
        frames = [builder.format_piece(context, reader.index, piece) for piece in pieces]
        if reader.error is not None:
            frames.append(self._end_with(reader.error))
        elif reader.choice is not None:
            frames.append(builder.format_choice_end(context, reader.choice))
            self._open = self._choices.open_readers
            if not self._open:
                choices = self._choices.ended
                frames.append(builder.format_stream_end(context, choices, self._choices.report.usage))
                self.is_done = True
        return b"".join(frames)

    def _end_with(self, error: Exception) -> bytes:
        if is_internal(error):
            logger.error("%s failed in mid-stream", self._request_id, exc_info=error)
        self.is_done = True
        # What the engine says of the end counts; of a fault of our own it knows nothing.
        report = self._choices.report
        report.finish = report.finish if report.finish in ("cancelled", "error") else "error"
        return self._builder.format_stream_error(explain(error), self._request_id)
