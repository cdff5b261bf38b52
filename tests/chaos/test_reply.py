from __future__ import annotations

import json
from typing import Any

import pytest

from chaos.client import Answer
from chaos.reply import Reply, find_fault, read_reply

ERROR = {
    "type": "error",
    "error": {"message": "m", "type": "t", "param": None, "code": "c"},
    "detail": "m",
    "request_id": "r",
}


def answer(body: Any, status: int = 200, *, kind: str = "application/json", retry: str = "") -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"x-request-id": "r", "content-type": kind} | ({"retry-after": retry} if retry else {})
    return Answer(status, headers, data)


def stream(*frames: Any) -> Answer:
    data = "".join(f"data: {frame if isinstance(frame, str) else json.dumps(frame)}\n\n" for frame in frames)
    return answer(data.encode(), kind="text/event-stream")


def chunk(text: str = "", finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


def test_a_sound_answer_has_no_fault() -> None:
    assert find_fault(answer({})) is None
    assert find_fault(answer(ERROR, 422)) is None
    assert find_fault(answer(ERROR, 429, retry="1")) is None


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (answer(b"Traceback (most recent call last)"), "inside"),
        (answer(ERROR | {"detail": "injected into a forward"}, 500), "inside"),
        (Answer(200, {}, b""), "x-request-id"),
        (answer(b"404: Not Found", 404), "not JSON"),
        (answer({"error": "no"}, 404), "error body"),
        (answer(ERROR | {"request_id": "other"}, 404), "error body"),
        (answer(ERROR, 503), "Retry-After"),
    ],
)
def test_what_no_answer_may_be_is_found(bad: Answer, match: str) -> None:
    assert match in (find_fault(bad) or "")


def test_streams_of_both_protocols_are_read() -> None:
    assert read_reply(stream(chunk("a"), chunk("b"), chunk(finish="stop"), "[DONE]")) == Reply("ab", "stop")
    usage = {"choices": [], "usage": {}}
    assert read_reply(stream(chunk("a"), chunk(finish="stop"), usage, "[DONE]")) == Reply("a", "stop")
    delta = {"type": "content_block_delta", "delta": {"text": "a"}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
    assert read_reply(stream({"type": "message_start"}, delta, end, "[DONE]")) == Reply("a", "end_turn")


def test_a_stream_that_ends_with_an_error_has_no_finish_reason() -> None:
    assert read_reply(stream(chunk("a"), ERROR)) == Reply("a", None)


@pytest.mark.parametrize("bad", [stream(chunk("a")), answer(b"data: x", kind="text/event-stream")])
def test_a_stream_without_an_end_is_an_error(bad: Answer) -> None:
    with pytest.raises((ValueError, KeyError)):
        read_reply(bad)
