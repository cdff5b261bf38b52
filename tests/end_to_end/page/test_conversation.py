"""Asking, streaming, stopping, changing one's mind."""

from __future__ import annotations

import pytest

from chat_page import IDLE, READY, Chat, visit, wait_for_cancel
from fake_engine import Client, FakeEngine


def make_held_engine(*pieces: str) -> FakeEngine:
    """An engine that keeps the last piece back."""
    engine = FakeEngine(pieces)
    engine.is_held = True
    return engine


def test_the_page_loads_without_a_complaint_and_names_the_model(devtools: str) -> None:
    async def use(chat: Chat, _: Client) -> None:
        page = chat.page
        await page.wait(READY)
        assert await page.text("#status-text") == "astrai"
        assert await page.evaluate("document.title") == "astrai · astrai"
        assert await page.text("#context") == "context of 4,096 tokens"
        assert await page.evaluate("document.activeElement.id") == "message"
        assert page.problems == []

    visit(devtools, FakeEngine(), use)


def test_an_answer_is_seen_while_it_streams_and_ends_with_its_figures(devtools: str) -> None:
    engine = make_held_engine("Hel", "lo", " **you**")
    engine.cached_tokens = 7

    async def use(chat: Chat, _: Client) -> None:
        page = chat.page
        await page.wait(READY)
        await chat.send("hi")
        await chat.wait_for_answer("Hello")
        assert await page.evaluate("document.querySelector('.answer').ariaBusy") == "true"
        assert await page.evaluate("document.querySelector('#send').ariaLabel") == "Stop the answer"
        engine.is_held = False
        await page.wait(IDLE)
        await chat.wait_for_answer("Hello you")
        assert await chat.count(".prose strong") == 1
        facts = await chat.read_facts()
        assert facts.keys() == {"speed", "TTFT", "prompt", "output", "finish"}
        assert facts["speed"].endswith(" tok/s")
        assert float(facts["speed"].split()[0]) > 0
        assert facts["TTFT"].split()[1] in ("ms", "s")
        assert (facts["prompt"], facts["output"], facts["finish"]) == ("19 (7 cached)", "3", "stop")
        assert await page.text("#context") == "context 22 of 4,096 tokens"
        assert page.problems == []

    visit(devtools, engine, use)
    assert engine.prompts == ["<user>hi<assistant>"]


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stopping_cancels_the_task_keeps_the_text_and_frees_the_page(devtools: str, way: str) -> None:
    engine = make_held_engine("Half", " of it")

    async def use(chat: Chat, client: Client) -> None:
        await chat.send("hi")
        await chat.wait_for_answer("Half")
        await (chat.page.click("#send") if way == "button" else chat.page.press("Escape"))
        await chat.page.wait(IDLE)
        await wait_for_cancel(engine, client)
        assert (await chat.read_facts())["finish"] == "stopped by you"
        engine.is_held = False
        await chat.ask("go on")
        await chat.wait_for_answer("Half of it")
        assert chat.page.problems == []

    visit(devtools, engine, use)
    assert engine.num_cancelled == 1
    assert engine.prompts[1] == "<user>hi<assistant>Half<user>go on<assistant>"


def test_a_new_chat_during_an_answer_cancels_it(devtools: str) -> None:
    engine = make_held_engine("Half", " of it")

    async def use(chat: Chat, client: Client) -> None:
        await chat.send("hi")
        await chat.wait_for_answer("Half")
        await chat.page.click("#new")
        await chat.page.wait("!document.querySelector('.busy') && !document.querySelector('.turn')")
        await wait_for_cancel(engine, client)

    visit(devtools, engine, use)


def test_while_an_answer_comes_nothing_else_is_sent(devtools: str) -> None:
    engine = make_held_engine("Half", " of it")

    async def use(chat: Chat, _: Client) -> None:
        await chat.send("one")
        await chat.wait_for_answer("Half")
        await chat.send("two")
        engine.is_held = False
        await chat.page.wait(IDLE)
        assert await chat.page.evaluate("document.querySelector('#message').value") == "two"

    visit(devtools, engine, use)
    assert engine.prompts == ["<user>one<assistant>"]


def test_the_settings_go_along_with_a_question(devtools: str) -> None:
    engine = FakeEngine()

    async def use(chat: Chat, _: Client) -> None:
        await chat.page.click("#toggle")
        assert await chat.page.evaluate("document.activeElement.id") == "system"
        await chat.page.type("Be brief.")
        for name, value in (("temperature", "0.25"), ("top_p", "0.5"), ("top_k", "7"), ("max_tokens", "9")):
            await chat.set_field(name, value)
        await chat.set_field("seed", "42")
        await chat.set_field("stop", "END\\n\n\\\\n")
        await chat.ask("hi")
        await chat.set_field("max_tokens", "")
        await chat.set_field("seed", "")
        await chat.ask("again")

    visit(devtools, engine, use)
    first, second = engine.params
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.25, 0.5, 7, 9)
    assert first.seed == 42
    assert tuple(first.stop) == ("END\n", "\\n")
    assert engine.prompts[0] == "<system>Be brief.<user>hi<assistant>"
    # What is left empty is left to the server.
    assert (second.max_tokens, second.seed) == (2048, None)


def test_a_setting_out_of_range_is_shown_instead_of_sent(devtools: str) -> None:
    engine = FakeEngine()

    async def use(chat: Chat, _: Client) -> None:
        await chat.set_field("max_tokens", "0")
        await chat.send("hi")
        await chat.page.wait("document.activeElement.id === 'max_tokens'")
        assert await chat.page.evaluate("document.querySelector('#message').value") == "hi"

    visit(devtools, engine, use)
    assert engine.prompts == []


def test_the_last_answer_can_be_had_again_and_the_last_message_changed(devtools: str) -> None:
    engine = FakeEngine(["one"])

    async def use(chat: Chat, _: Client) -> None:
        await chat.ask("first")
        await chat.ask("second")
        engine.pieces = ["two"]
        await chat.press_button("Regenerate")
        await chat.wait_for_answer("two")
        await chat.page.wait(IDLE)
        await chat.page.click(".turn:last-child [aria-label='Edit your message']")
        assert await chat.page.evaluate("document.querySelector('#message').value") == "second"
        await chat.page.evaluate("document.querySelector('#message').setSelectionRange(99, 99)")
        await chat.ask(" try")
        assert await chat.page.text(".turn:last-child .text") == "second try"
        assert await chat.count(".turn") == 2

    visit(devtools, engine, use)
    history = "<user>first<assistant>one"
    assert engine.prompts[1:] == [
        f"{history}<user>second<assistant>",
        f"{history}<user>second<assistant>",
        f"{history}<user>second try<assistant>",
    ]


def test_a_reload_keeps_the_conversation_and_the_settings(devtools: str) -> None:
    engine = FakeEngine(["fine"])

    async def use(chat: Chat, _: Client) -> None:
        await chat.set_field("top_k", "3")
        await chat.ask("one")
        # A tab that is discarded does not get to save anything.
        assert "fine" in await chat.page.evaluate("sessionStorage['astrai.chat']")
        await chat.page.reload()
        await chat.page.wait(READY)
        await chat.ask("two")
        assert await chat.page.evaluate("localStorage.length") == 0

    visit(devtools, engine, use)
    assert engine.prompts[1] == "<user>one<assistant>fine<user>two<assistant>"
    assert engine.params[1].top_k == 3


def test_a_reload_in_mid_stream_cancels_the_task_and_keeps_the_text(devtools: str) -> None:
    engine = make_held_engine("Half", " of it")

    async def use(chat: Chat, client: Client) -> None:
        await chat.send("one")
        await chat.wait_for_answer("Half")
        await chat.page.reload()
        await wait_for_cancel(engine, client)
        await chat.wait_for_answer("Half")
        assert (await chat.read_facts())["finish"] == "stopped by you"

    visit(devtools, engine, use)


def test_a_new_chat_can_be_taken_back_until_something_is_asked(devtools: str) -> None:
    engine = FakeEngine(["fine"])

    async def use(chat: Chat, _: Client) -> None:
        await chat.ask("one")
        await chat.page.click("#new")
        assert await chat.count(".turn") == 0
        await chat.page.click("#restore")
        assert await chat.count(".turn") == 1
        await chat.page.click("#new")
        await chat.ask("two")
        await chat.page.click("#new")
        await chat.page.click("#restore")
        assert await chat.page.text("#log .text") == "two"

    visit(devtools, engine, use)
    assert engine.prompts[1] == "<user>two<assistant>"


def test_the_view_follows_the_answer_only_from_its_end(devtools: str) -> None:
    engine = make_held_engine("line\n\n" * 80, "more\n\n" * 40)
    left = "(s => s.scrollHeight - s.scrollTop - s.clientHeight)(document.querySelector('#scroller'))"

    async def use(chat: Chat, _: Client) -> None:
        page = chat.page
        await chat.send("hi")
        await page.wait(f"document.querySelectorAll('.prose p').length === 80 && {left} < 2")
        await page.evaluate("document.querySelector('#scroller').scrollBy(0, -30)")
        # The event of the scrolling comes with the next frame.
        await page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        engine.is_held = False
        await page.wait(IDLE)
        assert await page.evaluate(left) > 300
        await page.click("#jump")
        await page.wait(f"{left} < 2 && document.querySelector('#jump').hidden")

    visit(devtools, engine, use)
