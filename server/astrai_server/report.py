"""What the log and the metrics say about one request."""

from __future__ import annotations

import time
from typing import Protocol

import attrs

from astrai_server.builder import Usage


class StreamMeter(Protocol):
    """Who wants to know when the tokens of streams go out."""

    def observe_first_token(self, seconds: float) -> None: ...

    def observe_gaps(self, seconds: float, count: int) -> None: ...


@attrs.define
class Report:
    """Tokens and times of one request, all its choices together."""

    started: float = attrs.field(factory=time.perf_counter)
    first_token: float | None = None
    last_token: float = 0.0
    prompt_tokens: int | None = None
    """None until the request is admitted."""
    cached_tokens: int = 0
    num_tokens: int = 0
    """Tokens that the answer has so far."""
    finish: str | None = None
    meter: StreamMeter | None = None
    """Is told of the tokens of a stream."""

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            prompt_tokens=self.prompt_tokens or 0,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.num_tokens,
        )

    def note_tokens(self, count: int) -> None:
        """``count`` more tokens have come."""
        self.num_tokens += count
        last, self.last_token = self.last_token, time.perf_counter()
        if self.first_token is None and count:
            self.first_token = last = self.last_token
            if self.meter is not None:
                self.meter.observe_first_token(self.first_token - self.started)
                count -= 1
        if self.meter is not None:
            self.meter.observe_gaps(self.last_token - last, count)

    def __str__(self) -> str:
        if self.prompt_tokens is None:
            return ""
        text = f" finish={self.finish or 'none'} in={self.prompt_tokens} ({self.cached_tokens} cached)"
        text += f" out={self.num_tokens}"
        if self.first_token is not None:
            text += f" ttft={(self.first_token - self.started) * 1e3:.1f}ms"
            if self.num_tokens > 1:
                gap = (self.last_token - self.first_token) / (self.num_tokens - 1)
                text += f" itl={gap * 1e3:.2f}ms"
        return text
