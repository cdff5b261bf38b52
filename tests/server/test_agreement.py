"""Whatever the model says, a stream joined is the whole answer, in both protocols, with and without tools."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers import CHAT, END, MESSAGES, Reading, make_body, read_one, run_engine
from astrai_server.answer import CallArguments, CallStart, Text
from astrai_server.tools.parser import ToolCallParser
from fake_engine import Answer, build_settings, serve_in_thread
from fakes import EOS, Context

CALLS = (
    '<tool_call>{"name": "f", "arguments": {"a": "é😀}"}}</tool_call>',
    '<tool_call>\n{"arguments": {"b": [1, {}]}, "name": "f"}\n</tool_call>\n',
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
    '{"name": "f", "parameters": {"a": 1.50}}',
)
FRAGMENTS = (
    "a",
    "b ",
    " ",
    "\n",
    "é",
    "😀",
    "👩‍👧",
    "<",
    "<tool",
    "<tool_call>",
    "</tool_call>",
    "STOP",
    "ST",
    "OP",
)
BROKEN = (b"\xf0\x9f", b"\xff", b"\xc3")
STOPS = ("STOP", "😀", " \n", "bb", "<tool_call>", '"name"', "\ufffd")

texts = st.lists(
    st.one_of(
        st.sampled_from([text.encode() for text in FRAGMENTS + CALLS]),
        st.sampled_from(BROKEN),
        st.sampled_from(CALLS).flatmap(
            lambda call: st.integers(0, len(call)).map(lambda end: call[:end].encode())
        ),
    ),
    max_size=7,
).map(b"".join)
limits = st.one_of(st.just(900), st.integers(0, 60))
stop_lists = st.lists(st.sampled_from(STOPS), max_size=2, unique=True)


@attrs.define
class Speaker:
    """A script that answers with ``text``, whatever was asked."""

    text: bytes = b""

    def __call__(self, context: Context) -> int:
        data = bytes(token_id for token_id in context if token_id < EOS)
        num_said = len(data) - data.rfind(END.encode()) - len(END)
        return self.text[num_said] if num_said < len(self.text) else EOS


@attrs.frozen
class Server:
    """A server whose model says what a test wants."""

    connection: http.client.HTTPConnection
    speaker: Speaker

    def ask(self, path: str, text: bytes, **fields: Any) -> tuple[Reading, Reading]:
        """The answer whole, and the stream joined."""
        self.speaker.text = text
        return self._post(path, **fields), self._post(path, stream=True, **fields)

    def _post(self, path: str, **fields: Any) -> Reading:
        body = json.dumps(make_body(**fields))
        self.connection.request("POST", path, body, {"content-type": "application/json"})
        response = self.connection.getresponse()
        return read_one(Answer(response.status, response.headers, response.read()))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    speaker = Speaker()
    with (
        run_engine(speaker, max_seq_len=2048, max_step_tokens=2048) as engine,
        serve_in_thread(engine, build_settings()) as url,
    ):
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
        yield Server(connection, speaker)
        connection.close()


def tools_of(path: str) -> list[dict[str, Any]]:
    if path == CHAT:
        return [{"type": "function", "function": {"name": "f"}}]
    return [{"name": "f", "input_schema": {"type": "object"}}]


def stop_of(path: str, stops: list[str]) -> dict[str, Any]:
    return {"stop" if path == CHAT else "stop_sequences": stops}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@settings(max_examples=40)
@given(text=texts, stops=stop_lists, max_tokens=limits)
def test_of_text(server: Server, path: str, text: bytes, stops: list[str], max_tokens: int) -> None:
    whole, streamed = server.ask(path, text, max_tokens=max_tokens, **stop_of(path, stops))
    assert streamed == whole
    said = text[:max_tokens].decode(errors="replace")
    ends = [at for at in map(said.find, stops) if at >= 0]
    # Of stop strings that overlap, the one that is complete first counts.
    assert whole.text == said if not ends else said.startswith(whole.text) and len(whole.text) >= min(ends)
    if len(ends) == 1:
        assert whole.text == said[: ends[0]]
    if not ends:
        assert (whole.reason in ("length", "max_tokens")) == (len(text) >= max_tokens)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@settings(max_examples=40)
@given(text=texts, stops=stop_lists, max_tokens=limits, is_parallel=st.booleans())
def test_of_calls(
    server: Server, path: str, text: bytes, stops: list[str], max_tokens: int, is_parallel: bool
) -> None:
    serial: dict[str, Any] = {"parallel_tool_calls": is_parallel}
    if path == MESSAGES:
        serial = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": not is_parallel}}
    fields = stop_of(path, stops) | serial | {"tools": tools_of(path), "max_tokens": max_tokens}
    whole, streamed = server.ask(path, text, **fields)
    assert streamed == whole
    if not stops:
        said, calls, is_done = parse(text[:max_tokens].decode(errors="replace"), is_parallel)
        assert (whole.text, whole.calls) == (said, calls)
        has_ended = len(text) < max_tokens
        assert (whole.reason in ("tool_calls", "tool_use")) == (is_done or (has_ended and bool(calls)))
        assert (whole.reason in ("length", "max_tokens")) == (not is_done and not has_ended)


@pytest.mark.parametrize("num_more", [0, 1, 40])
def test_how_the_text_goes_on_behind_the_only_call_does_not_count(server: Server, num_more: int) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}'
    fields = {"tools": tools_of(CHAT), "parallel_tool_calls": False, "max_tokens": len(call) + num_more}
    expected = Reading(text="", reason="tool_calls", calls=(("f", {}),))
    assert server.ask(CHAT, f"{call}}}{'z' * 100}".encode(), **fields) == (expected, expected)


def test_the_only_call_that_breaks_off_does_not_make_the_answer_complete(server: Server) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "x'
    fields = {"tools": tools_of(CHAT), "parallel_tool_calls": False, "max_tokens": len(call)}
    expected = Reading(text="", reason="length", calls=(("f", {"a": "x"}),))
    assert server.ask(CHAT, f"{call}{'y' * 100}".encode(), **fields) == (expected, expected)


def parse(text: str, is_parallel: bool) -> tuple[str, tuple[tuple[str, Any], ...], bool]:
    """Text, calls, and whether nothing more was wanted, by the parser alone, all at once."""
    parser = ToolCallParser(["f"], tool_format="auto", is_parallel=is_parallel, new_id=lambda: "id")
    pieces, is_done = parser.push(text), parser.is_done
    pieces += parser.flush()
    arguments: dict[int, str] = {}
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index] = arguments.get(piece.index, "") + piece.text
    calls = [
        (piece.name, json.loads(arguments[piece.index])) for piece in pieces if isinstance(piece, CallStart)
    ]
    return "".join(piece.text for piece in pieces if isinstance(piece, Text)), tuple(calls), is_done


@settings(max_examples=40)
@given(
    text=texts, stops=stop_lists, max_tokens=limits, has_tools=st.booleans(), top_logprobs=st.integers(0, 2)
)
def test_of_log_probabilities(
    server: Server, text: bytes, stops: list[str], max_tokens: int, has_tools: bool, top_logprobs: int
) -> None:
    fields: dict[str, Any] = {"tools": tools_of(CHAT)} if has_tools else {}
    fields |= {"logprobs": True, "top_logprobs": top_logprobs, "stop": stops, "max_tokens": max_tokens}
    whole, streamed = server.ask(CHAT, text, **fields)
    assert (streamed.text, streamed.logprobs or []) == (whole.text, whole.logprobs)
    assert streamed == attrs.evolve(whole, logprobs=whole.logprobs or streamed.logprobs)
    spelled = b"".join(bytes(entry["bytes"]) for entry in whole.logprobs)
    assert text.startswith(spelled)
    if not stops:
        assert spelled == text[:max_tokens]
    elif not has_tools:
        assert spelled.decode(errors="replace").startswith(whole.text)
