"""What can go wrong between a question and its answer."""

from __future__ import annotations


class ChatError(Exception):
    """A question got no answer, or not all of it; the text is the cause on one line.

    Not an ``AstraiError``: the library's errors come with torch, which takes seconds to import.

    Args:
        message: the cause.
        status: HTTP status, if that is what says so.
        retry_after_s: seconds after which the server wants to be asked again.
    """

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None):
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class MalformedFrameError(ChatError):
    """A frame of the answer is not what the protocol has there."""
