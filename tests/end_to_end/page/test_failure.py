"""Servers that load, refuse, fail or are gone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from astrai_server.keys import KeyRing, load_keys
from astrai_triton.errors import NonFiniteLogitsError, QueueFullError
from chat_page import IDLE, READY, Chat, visit
from fake_engine import Client, FakeEngine, build_settings

TROUBLE = "document.querySelector('.trouble')"


def list_faults(chat: Chat) -> list[Any]:
    """Complaints of the browser other than about responses with an error status."""
    return [problem for problem in chat.page.problems if problem.source != "network"]


def test_a_server_that_loads_is_waited_for_and_then_asked(
    devtools: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    # The page does not sit that out once the model is there.
    monkeypatch.setattr("astrai_server.problem.UNAVAILABLE_RETRY_S", 500.0)

    async def use(chat: Chat, client: Client) -> None:
        page = chat.page
        await page.wait("document.querySelector('#status').dataset.state === 'loading'")
        assert await page.text("#status-text") == "The model is loading…"
        await chat.send("hi")
        await page.wait(f"{TROUBLE}?.innerText.includes('Trying again in')")
        assert "HTTP 503" in await page.text(".trouble")
        client.gate.open(engine)  # type: ignore[arg-type]
        await page.wait(f"{READY} && {IDLE}")
        await chat.wait_for_answer("Hello")
        assert not await chat.count(".trouble")
        assert list_faults(chat) == []

    visit(devtools, None, use)


def test_a_full_queue_is_waited_for_as_long_as_the_server_says(devtools: str) -> None:
    engine = FakeEngine(refuse=QueueFullError(1, 2.0))

    async def use(chat: Chat, _: Client) -> None:
        await chat.send("hi")
        await chat.page.wait(f"{TROUBLE}?.innerText.includes('Trying again in 2 s')")
        assert "HTTP 429 · queue_full · request req_" in await chat.page.text(".trouble")
        engine.refuse = None
        await chat.page.wait(f"{TROUBLE}?.innerText.includes('Trying again in 1 s')")
        assert engine.prompts == []
        await chat.page.wait(IDLE)
        await chat.wait_for_answer("Hello")
        assert not await chat.count(".trouble")

    visit(devtools, engine, use)


def test_waiting_for_a_full_queue_can_be_cut_short_or_given_up(devtools: str) -> None:
    engine = FakeEngine(refuse=QueueFullError(1, 500.0))

    async def use(chat: Chat, _: Client) -> None:
        await chat.send("hi")
        await chat.page.wait(f"{TROUBLE}?.innerText.includes('Trying again in 500 s')")
        await chat.page.press("Escape")
        await chat.page.wait(IDLE)
        assert "The queue is full" in await chat.page.text(".trouble")
        await chat.press_button("Try again")
        await chat.page.wait(f"{TROUBLE}?.innerText.includes('Trying again in 500 s')")
        engine.refuse = None
        await chat.press_button("Try again now")
        await chat.wait_for_answer("Hello")

    visit(devtools, engine, use)


def test_a_failure_in_mid_stream_keeps_the_text_and_says_what_the_server_said(devtools: str) -> None:
    error = NonFiniteLogitsError("task 7: the logits are not finite")
    engine = FakeEngine(["Hel", ""], finish="error", error=error)
    engine.is_held = True

    async def use(chat: Chat, _: Client) -> None:
        await chat.send("hi")
        await chat.wait_for_answer("Hel")
        engine.is_held = False
        await chat.page.wait(IDLE)
        await chat.wait_for_answer("Hel")
        trouble = await chat.page.text(".trouble")
        assert "Task 7: the logits are not finite" in trouble
        assert "request req_" in trouble
        engine.finish, engine.error = "stop", None
        await chat.press_button("Try again")
        await chat.page.wait(f"{IDLE} && !{TROUBLE}")
        await chat.wait_for_answer("Hel")
        assert list_faults(chat) == []

    visit(devtools, engine, use)


def test_a_refused_question_shows_the_reason_and_stays_out_of_the_conversation(devtools: str) -> None:
    engine = FakeEngine(max_seq_len=40)

    async def use(chat: Chat, _: Client) -> None:
        await chat.ask("word " * 20)
        trouble = await chat.page.text(".trouble")
        assert "maximum context length is 40 tokens" in trouble.lower()
        assert "HTTP 400 · context_length_exceeded · request req_" in trouble
        await chat.ask("hi")
        await chat.wait_for_answer("Hello")

    visit(devtools, engine, use)
    assert engine.prompts == ["<user>hi<assistant>"]


def test_a_server_that_is_gone_is_noticed_and_found_again(devtools: str) -> None:
    async def use(chat: Chat, _: Client) -> None:
        page = chat.page
        await page.wait(READY)
        await page.call("Network.enable")
        offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        await page.call("Network.emulateNetworkConditions", offline=True, **offline)
        await chat.ask("hi")
        assert "cannot be reached" in await page.text(".trouble")
        await page.wait("document.querySelector('#status').dataset.state === 'offline'")
        await page.call("Network.emulateNetworkConditions", offline=False, **offline)
        await page.wait(READY)
        await chat.press_button("Try again")
        await chat.wait_for_answer("Hello")
        assert list_faults(chat) == []

    visit(devtools, FakeEngine(), use)


def test_a_stream_that_ends_too_early_is_no_answer(devtools: str) -> None:
    async def use(chat: Chat, _: Client) -> None:
        frame = 'data: {"choices":[{"index":0,"delta":{"content":"Hel"},"finish_reason":null}]}\n\n'
        await chat.page.wait(READY)
        await chat.page.evaluate(f"void (window.fetch = async () => new Response({json.dumps(frame)}))")
        await chat.ask("hi")
        await chat.wait_for_answer("Hel")
        assert "The connection ended before the answer did" in await chat.page.text(".trouble")

    visit(devtools, FakeEngine(), use)


def test_a_stream_is_read_whatever_pieces_it_comes_in(devtools: str) -> None:
    frames = (
        ": a comment\r\n\r\n"
        'data: {"choices":[{"index":0,"delta":{"content":"é😀"},"finish_reason":null}]}\r\n\r\n'
        'data: {"choices":[{"index":0,\ndata: "delta":{},"finish_reason":"stop"}]}\n\ndata:[DONE]\n\n'
    )

    async def use(chat: Chat, _: Client) -> None:
        await chat.page.wait(READY)
        await chat.page.evaluate(
            f"""void (window.fetch = async () => new Response(new ReadableStream({{ start(to) {{
                for (const byte of new TextEncoder().encode({json.dumps(frames)}))
                    to.enqueue(Uint8Array.of(byte));
                to.close();
            }} }})))"""
        )
        await chat.ask("hi")
        await chat.wait_for_answer("é😀")
        assert not await chat.count(".trouble")
        assert (await chat.read_facts())["finish"] == "stop"

    visit(devtools, FakeEngine(), use)


@pytest.fixture
def keys() -> KeyRing:
    return load_keys(build_settings(), {"ASTRAI_API_KEYS": "ann:correct-horse-battery"})


def test_a_server_with_keys_shows_its_page_and_asks_for_one(devtools: str, keys: KeyRing) -> None:
    async def use(chat: Chat, _: Client) -> None:
        page = chat.page
        await page.wait("document.querySelector('#status-text').innerText.includes('API key')")
        await chat.ask("hi")
        assert "HTTP 401 · invalid_api_key" in await page.text(".trouble")
        assert await page.evaluate("document.activeElement.id") == "key"
        await page.type("correct-horse-battery")
        await page.press("Tab")
        await page.wait(READY)
        await chat.press_button("Try again")
        await chat.wait_for_answer("Hello")
        assert "correct-horse" in await page.evaluate("JSON.stringify({ ...sessionStorage })")
        assert await page.evaluate("localStorage.length") == 0
        assert list_faults(chat) == []

    visit(devtools, FakeEngine(), use, keys=keys)
