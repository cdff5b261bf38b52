"""What an answer says, in either protocol, whole or streamed, and what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import attrs

from chaos.client import Answer

_LEAKS = (b"Traceback", b"injected", b'.py"', b"InjectedError", b"MemoryError")


@attrs.frozen
class Reply:
    """The text of an answer and how it ended."""

    text: str
    finish: str | None
    """None: with an error."""


def find_fault(answer: Answer, *, is_head: bool = False) -> str | None:
    """Say what no answer may be, or None: an error without the error body, a word from the inside."""
    leak = next((word for word in _LEAKS if word in answer.body), None)
    if leak is not None:
        return f"the answer tells of the server's inside: {leak!r}"
    if "x-request-id" not in answer.headers:
        return "the answer has no x-request-id"
    if answer.status < 400 or is_head:
        return None
    try:
        body = answer.json
    except ValueError:
        return f"the error body is not JSON: {answer.body[:100]!r}"
    is_right = (
        isinstance(body, dict)
        and body.keys() == {"type", "error", "detail", "request_id"}
        # Some errors say more, for clients that can help themselves.
        and body["error"].keys() - {"details"} == {"message", "type", "param", "code"}
        and body["request_id"] == answer.headers["x-request-id"]
    )
    if not is_right:
        return f"not the error body of all routes: {answer.body[:200]!r}"
    if answer.status in (429, 503) and "retry-after" not in answer.headers:
        return "no Retry-After"
    return None


def read_reply(answer: Answer) -> Reply:
    """Read an answer of status 200.

    Raises:
        ValueError, KeyError, IndexError, TypeError: it is not one of either protocol.
    """
    if answer.headers["content-type"].startswith("text/event-stream"):
        return _read_stream(answer.body)
    body = answer.json
    if "choices" in body:
        choice = body["choices"][0]
        return Reply(choice["message"]["content"], choice["finish_reason"])
    return Reply("".join(block["text"] for block in body["content"]), body["stop_reason"])


def _read_stream(body: bytes) -> Reply:
    if not body.endswith(b"\n\n"):
        raise ValueError("the stream does not end with an empty line")
    frames = [
        frame.splitlines()[-1].removeprefix("data: ") for frame in body.decode("ascii")[:-2].split("\n\n")
    ]
    text, finish = "", None
    for frame in frames[:-1]:
        piece, reason = _read_frame(json.loads(frame))
        text, finish = text + piece, reason or finish
    if frames[-1] == "[DONE]":
        return Reply(text, finish)
    if json.loads(frames[-1])["error"]["message"]:
        return Reply(text, None)
    raise ValueError("the stream ends neither with [DONE] nor with an error")


def _read_frame(frame: dict[str, Any]) -> tuple[str, str | None]:
    """Text and finish reason of one frame."""
    if "choices" in frame:
        if not frame["choices"]:
            # The usage.
            return "", None
        choice = frame["choices"][0]
        return choice["delta"].get("content", ""), choice["finish_reason"]
    if frame["type"] == "content_block_delta":
        return frame["delta"]["text"], None
    if frame["type"] == "message_delta":
        return "", frame["delta"]["stop_reason"]
    return "", None
