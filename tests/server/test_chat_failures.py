"""``astrai chat`` with everything that servers do: refuse, break off, speak another dialect."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import attrs
import pytest

from astrai_triton.errors import ContextLengthError, NonFiniteLogitsError, QueueFullError
from chatting import DONE, END, GOOD, Reply, chat, frame, odd_server, talk
from fake_engine import FakeEngine, serve_in_thread

BUSY = Reply((b'{"error": {"message": "full"}}',), 429, "application/json", {"Retry-After": "3"})
FAILURES = [
    (
        Reply(status=404, type="text/html", pieces=(b"<html>",)),
        "answers 404: Not Found; are --url and --model",
    ),
    (Reply(status=401), "the server wants an API key (401): Unauthorized; give it as OPENAI_API_KEY"),
    (Reply(status=403), "the server refuses access (403): Forbidden"),
    (BUSY, "the server is busy (429): full; it asks to be tried again in 3 s"),
    (attrs.evolve(BUSY, headers={"Retry-After": "Fri, 01 Jan 2021 00:00:00 GMT"}), "tried again in 1 s"),
    (attrs.evolve(BUSY, headers={"Retry-After": "soon"}), "the server is busy (429): full\n"),
    (Reply(status=503, pieces=(b"warming\nup\x1b[2J",), type="text/plain"), "not ready (503): warming up\n"),
    (Reply(status=500), "the server answers 500: Internal Server Error"),
    (Reply(status=307, headers={"Location": "https://elsewhere/v1"}), "points to https://elsewhere/v1 (307)"),
    (Reply((b"<html>hello</html>",), type="text/html"), "wanted a stream of events, got text/html"),
    (Reply((b'{"error": "no"}',), type="application/json"), "the server reports an error: no"),
    (Reply((b"{",), type="application/json"), "a frame that is not JSON: {"),
    (Reply((frame("part"), b"data: {oops\x1b[2J\n\n")), "a frame that is not JSON: {oops\n"),
    (Reply((frame("part"), b'data: {"error": {"message": "out of memory"}}\n\n')), "an error: out of memory"),
    (Reply((frame("part"),)), "the connection ended before the answer did"),
    (Reply((frame("part"),), is_cut=True), "the connection ended before the answer did"),
    (Reply((frame("part"), b'data: {"choi')), "the connection ended before the answer did"),
    (Reply(), "the connection ended before the answer did"),
    (Reply((DONE,)), "the answer is empty"),
]


@pytest.mark.parametrize(("reply", "cause"), FAILURES)
def test_a_failure_is_one_line_and_status_1(reply: Reply, cause: str) -> None:
    with odd_server(reply) as server:
        result = chat(server.url, "hi")
    assert result.exit_code == 1
    assert result.stdout == ("part\n" if frame("part") in reply.pieces else "")
    lines = result.stderr.splitlines(keepends=True)
    assert lines[0].startswith("error: ")
    assert cause in lines[0]
    assert all(line.startswith("[") for line in lines[1:])
    assert "\x1b" not in result.output


@pytest.mark.parametrize(("reply", "cause"), FAILURES)
def test_after_a_failure_the_chat_goes_on_and_the_question_can_be_repeated(reply: Reply, cause: str) -> None:
    with odd_server(reply, GOOD) as server:
        result = talk(server.url, "hi", "/retry", "more")
    assert cause in result.stderr
    assert "/retry asks again" in result.stderr
    assert result.stdout.endswith("fine\nfine\n")
    contents = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert contents == [["hi"], ["hi"], ["hi", "fine", "more"]]


def test_a_part_of_an_answer_stays_in_the_history() -> None:
    with odd_server(Reply((frame("part"),)), GOOD) as server:
        result = talk(server.url, "hi", "go on")
    assert "/retry asks again, /undo takes back what came of it" in result.stderr
    assert "1 chunk out, first after" in result.stderr
    assert "broken off" in result.stderr
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["hi", "part", "go on"]


@pytest.mark.parametrize(
    "pieces",
    [
        (frame("Hi ä"), END, DONE),
        (frame("Hi "), frame("ä"), END),
        (frame("Hi "), frame("ä"), DONE),
        (frame("Hi ä") + END.rstrip(b"\n"),),
        (frame("Hi ä") + END + b"data: [DONE]",),
        (b": ping\n\n", frame("Hi ä").replace(b"\n", b"\r\n"), END, DONE, b"data: garbage\n\n"),
        (b'data: {"choices":\ndata: [{"delta": {"content": "Hi \xc3', b'\xa4"}}]}\n\n', END, DONE),
    ],
)
def test_streams_of_all_sorts_are_read(pieces: tuple[bytes, ...]) -> None:
    with odd_server(Reply(pieces)) as server:
        result = chat(server.url, "hi")
    assert (result.exit_code, result.stdout) == (0, "Hi ä\n")
    assert "the server counts no tokens" in result.stderr


def test_a_server_that_does_not_stream_is_understood() -> None:
    body = {
        "choices": [{"message": {"content": "all at once"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
    }
    with odd_server(Reply((json.dumps(body).encode(),), type="application/json")) as server:
        result = chat(server.url, "hi")
    assert result.stdout == "all at once\n"
    assert result.stderr.startswith("[3 tokens in, 4 out, first after ")


def test_stream_options_are_left_out_where_they_are_not_known() -> None:
    refusal = Reply((b'{"error": {"message": "unknown field stream_options"}}',), 400, "application/json")
    with odd_server(refusal, GOOD) as server:
        result = talk(server.url, "hi", "more")
    assert result.stdout == "fine\nfine\n"
    assert ["stream_options" in body for body in server.bodies] == [True, False, False]


def test_reasoning_is_shown_apart_and_stays_out_of_the_history() -> None:
    thinking = frame(delta={"reasoning_content": "hm\x1b[2J, "}), frame(delta={"reasoning_content": "well"})
    with odd_server(Reply((*thinking, frame("yes"), END, DONE))) as server:
        result = talk(server.url, "hi", "more")
        assert chat(server.url, "hi", "-q").stderr == ""
    assert result.stdout == "yes\nyes\n"
    assert "hm, well\n" in result.stderr
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["hi", "yes", "more"]


def test_the_model_cannot_steer_the_terminal() -> None:
    pieces = ("\x1b", "[2", "Jred \x1b]0;ti", "tle\x07", "x\rover \x9b31m", "\x08 \ud83d", "\ude00")
    with odd_server(Reply((*map(frame, pieces), END, DONE))) as server:
        assert chat(server.url, "hi").stdout == "red x\nover  😀\n"


def test_nobody_there_is_said_with_a_way_out() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        result = chat(url, "hi")
        assert result.exit_code == 1
        assert (
            result.stderr
            == f"error: cannot reach {url}/v1: Connection refused; `astrai serve` starts a server\n"
        )
        assert talk(url, "hi", "/retry").stderr.count("Connection refused") == 3


@pytest.mark.parametrize(
    ("answer", "cause"),
    [(b"", "closed the connection without an answer"), (b"SSH-2.0-x\r\n\r\n", "speaks no HTTP")],
)
def test_what_is_no_http_server_is_named(answer: bytes, cause: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        result = chat(f"http://127.0.0.1:{listener.getsockname()[1]}", "hi", "--model", "m")
        thread.join(10)
    assert result.exit_code == 1
    assert cause in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_silent_server_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        result = chat(f"http://127.0.0.1:{listener.getsockname()[1]}", "hi", "--timeout", "0.05")
    assert result.exit_code == 1
    assert result.stderr == "error: the server sent nothing for 0.05 s\n"


@pytest.mark.parametrize(
    ("engine", "cause"),
    [
        (FakeEngine(refuse=QueueFullError(8, 2.5)), "busy (429): the queue is full (8 waiting)"),
        (FakeEngine(refuse=ContextLengthError(9, 5)), "the server answers 400: "),
        (FakeEngine(finish="error", error=NonFiniteLogitsError("NaN")), "the server reports an error: NaN"),
        (None, "not ready (503): Engine not initialized"),
    ],
)
def test_the_failures_of_our_own_server_are_told(engine: Any, cause: str) -> None:
    with serve_in_thread(engine) as url:
        result = chat(url, "hi")
    assert result.exit_code == 1
    assert cause in result.stderr
