from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from astrai_server import app
from fake_engine import Client, FakeEngine, ask

POST_ROUTES = ("/v1/chat/completions", "/v1/messages")


@pytest.mark.parametrize("path", POST_ROUTES)
def test_twenty_thousand_messages_are_handled(path: str) -> None:
    engine = FakeEngine(max_seq_len=1 << 20)
    messages = [{"role": "user", "content": "x"}] * 20_000
    answer = ask(engine, lambda client: client.post(path, {"messages": messages}))
    assert answer.status == 200
    assert len(engine.prompts[0]) == 20_000 * len("<user>x") + len("<assistant>")


def test_reading_and_tokenising_a_large_body_stalls_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    # Both wait for another request to be answered: in the event loop that would never happen.
    engine = FakeEngine(max_seq_len=1 << 22)
    others_answered = threading.Event()
    waits: list[bool] = []

    def waiting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **fields: Any) -> Any:
            waits.append(others_answered.wait(30))
            return function(*args, **fields)

        return call

    monkeypatch.setattr(app, "read_request", waiting(app.read_request))
    monkeypatch.setattr(engine.tokenizer, "encode_chat", waiting(engine.tokenizer.encode_chat))

    async def use(client: Client) -> None:
        messages = [{"role": "user", "content": "x" * 100}] * 1000
        large = asyncio.ensure_future(client.post(POST_ROUTES[0], {"messages": messages}))
        while not waits and not large.done():
            assert (await client.send("GET", "/health")).status == 200
            others_answered.set()
        assert (await large).status == 200

    ask(engine, use)
    assert waits == [True, True]
