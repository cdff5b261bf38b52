"""The choices of one request: what their tasks say, and how each ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import attrs

from astrai_server.answer import CallArguments, CallStart, Piece, PromptScores, Text
from astrai_server.builder import AnswerParser, Choice, Context
from astrai_server.problem import DeadlineError
from astrai_server.report import Report
from astrai_triton.errors import EngineUnavailableError, TaskError

if TYPE_CHECKING:
    from astrai_triton.engine import TaskHandle, TokenEvent
    from astrai_triton.engine.result import TokenLogprob


class ChoiceReader:
    """Reads the events of one task as pieces of one choice.

    Args:
        index: of the choice in its answer.
        task: what writes it.
        parser: finds calls of tools in its text; None: it is all text.
    """

    def __init__(self, index: int, task: TaskHandle, parser: AnswerParser | None = None) -> None:
        self.index = index
        self.task = task
        self.parser = parser
        self.num_tokens = 0
        self.choice: Choice | None = None
        """How it ended; None so far, and where it failed."""
        self.error: Exception | None = None
        """What it failed with."""
        self.is_satisfied = False
        """It is complete, though its task may go on."""
        self.is_cut = False
        """A call in it broke off with the text."""
        self._logprobs: list[TokenLogprob] = []
        """Of text that the parser has not given back yet."""

    def read_texts(self, texts: Sequence[str]) -> list[Piece]:
        """Pieces of tokens that are text and no more."""
        if self.parser is None:
            return [Text(text) for text in texts if text]
        return self._push(self.parser, "".join(texts))

    def read(self, events: Iterable[TokenEvent]) -> list[Piece]:
        """Pieces of the events that come next, up to where nothing more is wanted."""
        pieces: list[Piece] = []
        for event in events:
            if event.prompt_logprobs is not None:
                pieces.append(PromptScores(event.prompt_logprobs))
            if self.parser is None:
                if event.text or event.logprobs:
                    pieces.append(Text(event.text, event.logprobs))
                continue
            self._logprobs += event.logprobs
            if event.text:
                pieces += self._push(self.parser, event.text)
            if event.finish_reason is not None or self.is_satisfied:
                pieces += self._flush(self.parser)
                break
        return pieces

    @property
    def has_ended(self) -> bool:
        """Whether nothing follows."""
        return self.choice is not None or self.error is not None

    def _push(self, parser: AnswerParser, text: str) -> list[Piece]:
        pieces = self._attach(parser.push(text))
        self.is_satisfied = parser.is_done
        return pieces

    def _flush(self, parser: AnswerParser) -> list[Piece]:
        """The last pieces; a call that they complete is not one that the model completed."""
        pieces = parser.flush()
        self.is_cut = any(isinstance(piece, CallArguments) for piece in pieces)
        pieces = self._attach(pieces)
        return [*pieces, self._take_logprobs("")] if self._logprobs else pieces

    def _attach(self, pieces: list[Piece]) -> list[Piece]:
        """Give log-probabilities that wait to the first text among ``pieces``."""
        if self._logprobs:
            for i, piece in enumerate(pieces):
                if isinstance(piece, Text):
                    pieces[i] = self._take_logprobs(piece.text)
                    break
        return pieces

    def _take_logprobs(self, text: str) -> Text:
        entries, self._logprobs = self._logprobs, []
        return Text(text, tuple(entries))


class Choices:
    """All choices of one request.

    Args:
        tasks: one for each choice, in order.
        context: the request.
        report: is told of every token.
    """

    def __init__(self, tasks: Sequence[TaskHandle], context: Context, report: Report) -> None:
        make_parser: Callable[[], AnswerParser | None] = context.make_parser or (lambda: None)
        self.readers = [ChoiceReader(index, task, make_parser()) for index, task in enumerate(tasks)]
        self.report = report
        self.timeout_s: float | None = None
        """Set when the answer has taken that long, and was cancelled for it."""
        self._leaders = [reader.task for reader in self.readers[:: context.num_choices]]
        report.prompt_tokens = sum(task.prompt_len for task in self._leaders)

    @property
    def open_readers(self) -> list[ChoiceReader]:
        """Those that have not ended."""
        return [reader for reader in self.readers if not reader.has_ended]

    @property
    def ended(self) -> list[Choice]:
        """How those that have ended well did, in order."""
        return [reader.choice for reader in self.readers if reader.choice is not None]

    def cancel(self) -> None:
        """Cancel what still runs."""
        for reader in self.open_readers:
            reader.task.cancel()

    def expire(self, timeout_s: float) -> None:
        """Cancel everything because it took longer than ``timeout_s``."""
        self.timeout_s = timeout_s
        self.cancel()

    async def wait_for_prefill(self) -> None:
        """Wait until the cached tokens of every prompt are known.

        Raises:
            TaskError: a task failed before that.
            DeadlineError: it took too long.
        """
        for task in self._leaders:
            await task.started()
        if (error := self._late_error()) is not None:
            raise error
        self.count_cached()

    def count_cached(self) -> None:
        """Tell the report what was found in the prefix cache; a prompt of several choices counts once."""
        self.report.cached_tokens = sum(task.cached_tokens for task in self._leaders)

    def read_texts(self, reader: ChoiceReader, texts: Sequence[str]) -> list[Piece]:
        """Pieces of tokens that are text and no more; ends the choice where nothing more is wanted."""
        self.note_texts(reader, len(texts))
        pieces = reader.read_texts(texts)
        if reader.is_satisfied:
            self._end_early(reader)
        return pieces

    def note_texts(self, reader: ChoiceReader, count: int) -> None:
        """``count`` tokens came that are text and no more."""
        reader.num_tokens += count
        self.report.note_tokens(count)

    def read(self, reader: ChoiceReader, events: Sequence[TokenEvent]) -> list[Piece]:
        """Pieces of events, at least one; the last of them may end the choice, well or with an error."""
        last = events[-1]
        self.report.note_tokens(last.completion_tokens - reader.num_tokens)
        reader.num_tokens = last.completion_tokens
        pieces = reader.read(events)
        # How a task ended that went on behind the answer depends on when its events were read.
        if reader.is_satisfied:
            self._end_early(reader)
        elif last.finish_reason is not None:
            self.count_cached()
            self._conclude(reader, last)
        return pieces

    async def collect(self, reader: ChoiceReader) -> Choice:
        """The whole of one choice.

        Raises:
            DeadlineError: it was cancelled for taking too long.
            EngineUnavailableError: the server ended it.
            Exception: what ended its task.
        """
        if reader.parser is None:
            # Nothing can make it end early: it is read once.
            pieces = self.read(reader, await reader.task.finished())
        else:
            pieces = []
            async with aclosing(reader.task.batches()) as batches:
                async for events in batches:
                    pieces += self.read(reader, events)
                    if reader.has_ended:
                        break
        if reader.choice is None:
            raise reader.error or TaskError(f"task {reader.task.id} failed")
        return attrs.evolve(reader.choice, pieces=tuple(join_pieces(pieces)))

    def _end_early(self, reader: ChoiceReader) -> None:
        """End a choice that is complete though its task may go on."""
        self.count_cached()
        self._end(reader, Choice(index=reader.index, finish_reason="tool_calls"))
        reader.task.cancel()

    def _conclude(self, reader: ChoiceReader, last: TokenEvent) -> None:
        reason = last.finish_reason
        if reason != "stop" and reason != "length":
            self.report.finish = reason
            reader.error = self._explain_end(reader, last)
            return
        has_calls = reader.parser is not None and reader.parser.num_calls > 0 and reason == "stop"
        if last.stop_string is not None and reader.is_cut:
            # What would run is not what the model was about to ask for.
            has_calls = False
        choice = Choice(
            index=reader.index,
            finish_reason="tool_calls" if has_calls else reason,
            stop_string=None if has_calls else last.stop_string,
        )
        self._end(reader, choice)

    def _end(self, reader: ChoiceReader, choice: Choice) -> None:
        reader.choice = choice
        self.report.finish = choice.finish_reason

    def _explain_end(self, reader: ChoiceReader, last: TokenEvent) -> Exception:
        if last.finish_reason == "error":
            # What is not an Exception ends threads, never a task.
            error = last.error
            return error if isinstance(error, Exception) else TaskError(f"task {reader.task.id} failed")
        return self._late_error() or EngineUnavailableError(
            "the server ended this request because it is shutting down"
        )

    def _late_error(self) -> DeadlineError | None:
        if self.timeout_s is None:
            return None
        return DeadlineError(f"the answer took longer than {self.timeout_s:g} s")


def join_pieces(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same answer in as few pieces as can be."""
    for _, group in itertools.groupby(pieces, _identify):
        members = list(group)
        first = members[0]
        if isinstance(first, Text):
            texts = [piece for piece in members if isinstance(piece, Text)]
            logprobs = tuple(entry for piece in texts for entry in piece.logprobs)
            yield Text("".join([piece.text for piece in texts]), logprobs)
        elif isinstance(first, CallArguments):
            fragments = [piece.text for piece in members if isinstance(piece, CallArguments)]
            yield CallArguments(first.index, "".join(fragments))
        else:
            yield from members


def _identify(piece: Piece) -> tuple[type[Piece], int]:
    """What pieces that can be joined have in common."""
    return type(piece), piece.index if isinstance(piece, (CallStart, CallArguments)) else 0
