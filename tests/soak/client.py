"""A client of the soak: it has asked for one answer, reads at its own pace, and knows what may come."""

from __future__ import annotations

import asyncio
from typing import Literal

import attrs

from astrai_triton.engine import TaskHandle, TokenEvent
from astrai_triton.errors import NonFiniteLogitsError
from random_requests import Answer, Request, read_answer
from soak.faults import CURSED_FROM, FaultyCallback, InjectedError

Pace = Literal["eager", "slow", "late"]
"""Reads after every operation, now and then, or when all is over."""


@attrs.define(eq=False)
class Client:
    """One task from the outside."""

    request: Request
    expected: Answer
    """What the request gets alone."""
    handle: TaskHandle
    pace: Pace
    own_faults: frozenset[str]
    """Sources of errors that may end this task and no other."""
    callback: FaultyCallback | None = None
    shares: bool = True
    """Whether others have its salt."""
    may_be_cancelled: bool = False
    cancelled_at: int | None = None
    """Steps taken when it was cancelled."""
    events: list[TokenEvent] = attrs.field(factory=list)

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and self.events[-1].finish_reason is not None

    @property
    def end_source(self) -> str | None:
        """Where the error comes from that the task ended with; None: it did not."""
        error = self.events[-1].error if self.events else None
        if error is None:
            return None
        if isinstance(error, NonFiniteLogitsError):
            return "logits"
        if isinstance(error, MemoryError):
            return "memory"
        assert isinstance(error, InjectedError), f"an error that nobody injected: {error!r}"
        return error.source

    def read(self) -> str | None:
        """Take what is at hand. Returns what is wrong with it, None if nothing is."""
        events = self.handle.take()
        if not events:
            return None
        self.events += events
        answer = read_answer(self.events)
        if answer.reason in ("stop", "length"):
            return None if answer == self.expected else self._describe(answer)
        if answer.reason == "cancelled" and not self.may_be_cancelled:
            return f"ended as cancelled, which nobody asked for: {self._describe(answer)}"
        return None if self._is_beginning(answer) else self._describe(answer)

    def _is_beginning(self, answer: Answer) -> bool:
        num_tokens = len(answer.token_ids)
        return (
            answer.token_ids == self.expected.token_ids[:num_tokens]
            and answer.logprobs == self.expected.logprobs[:num_tokens]
            and self.expected.text.startswith(answer.text)
        )

    def _describe(self, answer: Answer) -> str:
        return f"{self.request}: {answer}, alone {self.expected}"

    def check_end(self) -> None:
        """Whoever broke its own task feels it, and nobody else; a salt of its own found nothing cached."""
        assert self.shares or not self.handle.cached_tokens
        source = self.end_source
        if source in ("curse", "tokenizer", "callback"):
            assert source in self.own_faults, f"{self.request} ended of the fault of another: {source}"
        if self.callback is not None:
            # Its own failure it is told as one more event, the end.
            num_told = self.callback.num_events - (source == "callback")
            assert num_told == len(self.events), (
                f"{self.callback.num_events} calls, {len(self.events)} events"
            )
            assert (source == "callback") == (num_told == self.callback.fails_at)

    def leave(self) -> None:
        """Attach to an event loop that is closed before it hears of anything: nobody will ever read."""

        async def attach() -> None:
            self.handle.attach(lambda: None)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(attach())
        loop.close()
        self.may_be_cancelled = True


def is_cursed(request: Request) -> bool:
    """Whether forwards of this request fail from some length on."""
    return request.prompt[0] >= CURSED_FROM
