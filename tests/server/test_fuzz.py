"""Whatever a client sends, the status says whose mistake it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astrai_server.anthropic import MessagesRequest
from astrai_server.openai import ChatCompletionRequest
from fake_engine import Client, FakeEngine, build_settings, serve

EXPECTED = {200, 400, 413, 422}

TEXT = st.text(max_size=12) | st.sampled_from(
    ["", "user", "assistant", "text", "auto", "\ud800", "a" * 300, "7"]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=True, allow_infinity=True)
    | TEXT
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=6,
)
PARTS = st.fixed_dictionaries(
    {}, optional={"type": st.just("text") | VALUES, "text": TEXT | VALUES, "thinking": VALUES}
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | VALUES,
        "content": TEXT | st.lists(PARTS | VALUES, max_size=3) | VALUES,
        "tool_calls": VALUES
        | st.lists(
            st.fixed_dictionaries(
                {"function": st.fixed_dictionaries({"name": TEXT}, optional={"arguments": TEXT})}
            ),
            max_size=2,
        ),
    },
)


def bodies(kind: type[attrs.AttrsInstance]) -> st.SearchStrategy[dict[str, Any]]:
    names = [field.name for field in attrs.fields(kind) if field.name != "messages"]
    good = st.just([{"role": "user", "content": "hi"}])
    likely = {
        "messages": good | st.lists(MESSAGES | VALUES, max_size=3) | VALUES,
        "stream": st.booleans(),
        "stop": TEXT | st.lists(TEXT, max_size=3),
        "logit_bias": st.dictionaries(st.integers(-1, 300).map(str) | TEXT, st.floats(-120, 120) | VALUES),
        "stop_token_ids": st.lists(st.integers(-1, 300)),
        "temperature": st.floats(0, 2),
    }
    fields = {name: likely[name] | VALUES if name in likely else VALUES for name in names}
    return st.fixed_dictionaries({"messages": likely["messages"]}, optional=fields | {"unknown": VALUES})


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[asyncio.AbstractEventLoop, Client]]:
    loop = asyncio.new_event_loop()
    stack = AsyncExitStack()
    engine = FakeEngine(max_seq_len=256)
    client = loop.run_until_complete(
        stack.enter_async_context(serve(engine, build_settings(max_body_bytes=4096)))
    )
    yield loop, client
    loop.run_until_complete(stack.aclose())
    loop.close()


def check(server: tuple[asyncio.AbstractEventLoop, Client], path: str, body: bytes) -> None:
    loop, client = server
    answer = loop.run_until_complete(client.post(path, body))
    assert answer.status in EXPECTED, answer.body
    if answer.status != 200:
        assert answer.json["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.frames[-1] == "data: [DONE]"
    else:
        assert answer.json["usage"]
    assert client.gate.num_inside == 0


COMMON = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@COMMON
@given(body=bodies(ChatCompletionRequest))
def test_any_chat_completion_request_is_answered_or_refused(server: Any, body: dict[str, Any]) -> None:
    check(server, "/v1/chat/completions", json.dumps(body).encode())


@COMMON
@given(body=bodies(MessagesRequest))
def test_any_messages_request_is_answered_or_refused(server: Any, body: dict[str, Any]) -> None:
    check(server, "/v1/messages", json.dumps(body).encode())


@COMMON
@given(body=st.binary(max_size=100), path=st.sampled_from(["/v1/chat/completions", "/v1/messages"]))
def test_any_bytes_are_refused(server: Any, path: str, body: bytes) -> None:
    check(server, path, body)


@COMMON
@given(
    body=bodies(ChatCompletionRequest),
    at=st.integers(0, 200),
    junk=st.binary(max_size=4),
    path=st.sampled_from(["/v1/chat/completions", "/v1/messages"]),
)
def test_any_damaged_request_is_answered_or_refused(
    server: Any, body: dict[str, Any], at: int, junk: bytes, path: str
) -> None:
    data = json.dumps(body).encode()
    check(server, path, data[:at] + junk + data[at + 1 :])
