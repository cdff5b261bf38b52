"""Requests that take longer than ``limits.request_timeout_s``, over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fake_engine import Answer, Client, FakeEngine, ask, build_settings, chat_body

ROUTES = ("/v1/chat/completions", "/v1/messages")


def check_late(answer: Answer) -> None:
    assert answer.status == 504
    assert answer.json["type"] == "error"
    error = answer.json["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(path: str, stream: bool) -> None:
    engine = FakeEngine(["a", "b"])
    engine.is_held = True

    async def use(client: Client) -> None:
        # A stream that failed takes its connection along, so this one is not to be used again.
        answer = await client.post(path, chat_body(stream=stream), {"Connection": "close"})
        if stream:
            assert answer.status == 200
            error = json.loads(answer.frames[-1].splitlines()[-1].removeprefix("data: "))["error"]
            assert error["type"] == "timeout_error"
            assert b"[DONE]" not in answer.body
        else:
            check_late(answer)
        async with asyncio.timeout(5):
            while not engine.num_cancelled or client.gate.num_inside:
                await asyncio.sleep(0.01)
        engine.is_held = False
        assert (await client.post(path, chat_body())).status == 200

    ask(engine, use, build_settings(request_timeout_s=0.2))


def test_the_deadline_ends_a_request_that_waits_for_its_place() -> None:
    class Full(FakeEngine):
        async def _run(self, handle: Any, cancelled: asyncio.Event) -> None:
            await cancelled.wait()
            self.num_cancelled += 1
            self._post(handle, 0, finish_reason="cancelled")

    engine = Full()

    async def use(client: Client) -> Answer:
        return await client.message(stream=True)

    check_late(ask(engine, use, build_settings(request_timeout_s=0.1)))
    assert engine.num_cancelled == 1
