"""One answer while it arrives, and what is told about it in the end."""

from __future__ import annotations

import attrs

from astrai_server.chat.control import make_line
from astrai_server.chat.reply import Delta, Usage

STOPPED = "stopped"
FAILED = "error"

_FINISH_NOTES = {
    STOPPED: "stopped",
    FAILED: "broken off",
    "length": "cut at the token limit",
    "content_filter": "cut by a content filter",
    "tool_calls": "ended in a tool call, which this chat cannot answer",
}
_MIN_RATE_SPAN_S = 0.001


@attrs.define(kw_only=True)
class Answer:
    """What a question has been answered so far. Times are of one monotonic clock, in seconds."""

    question: str
    asked_s: float
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    """As the server says it, or ``STOPPED`` by the user, or ``FAILED``."""
    usage: Usage | None = None
    num_chunks: int = 0
    """Frames that brought text or reasoning."""
    first_s: float | None = None
    last_s: float = 0.0

    def add(self, delta: Delta, now_s: float) -> None:
        """Take in a frame that arrived at ``now_s``."""
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage
        if not (delta.text or delta.reasoning):
            return
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.num_chunks += 1
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s

    @property
    def is_whole(self) -> bool:
        """Whether the server ended it, not the user or a fault."""
        return self.finish_reason not in (STOPPED, FAILED)

    def describe(self) -> str:
        """Tokens, times and a special way to end, on one line."""
        parts = [self._describe_tokens()]
        if self.first_s is not None:
            parts.append(f"first after {_format_seconds(self.first_s - self.asked_s)}")
            rate = self._find_rate()
            if rate is not None:
                parts.append(f"then {rate:.1f} {'tokens' if self.usage else 'chunks'}/s")
        if self.finish_reason not in (None, "stop"):
            parts.append(_FINISH_NOTES.get(self.finish_reason, f"finish {make_line(self.finish_reason, 40)}"))
        return ", ".join(parts)

    def _describe_tokens(self) -> str:
        if self.usage is None:
            plural = "" if self.num_chunks == 1 else "s"
            # An answer that was stopped would have told its tokens at its end.
            reason = "; the server counts no tokens" if self.is_whole else ""
            return f"{self.num_chunks} chunk{plural} out{reason}"
        cached = "" if self.usage.cached_tokens is None else f" ({self.usage.cached_tokens} cached)"
        return f"{self.usage.prompt_tokens} tokens in{cached}, {self.usage.completion_tokens} out"

    def _find_rate(self) -> float | None:
        """Tokens or chunks per second after the first; None if all came at once."""
        num = self.num_chunks if self.usage is None else self.usage.completion_tokens
        span_s = self.last_s - (self.first_s or 0.0)
        return (num - 1) / span_s if num > 1 and span_s >= _MIN_RATE_SPAN_S else None


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
