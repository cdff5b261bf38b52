"""The page before ``astrai serve`` with a model in it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from browser import open_page
from chat_page import IDLE, READY, Chat
from server_process import Server

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

SCREENSHOT = "ASTRAI_SCREENSHOT"
"""Variable with the path to write a picture of the page to."""
MAX_PICTURE_BYTES = 300 << 10


def test_a_model_answers_is_stopped_and_goes_on(devtools: str, server: Server) -> None:
    async def use() -> None:
        async with open_page(devtools, f"{server.url}/", width=1280, height=800, scale=2) as page:
            chat = Chat(page)
            await page.wait(READY)
            assert await page.text("#status-text") == server.get("/v1/models")["data"][0]["id"]
            await chat.set_field("temperature", "0")
            await chat.set_field("max_tokens", "120")
            await chat.send("How do I reverse a list in Python?")
            await page.wait("document.querySelector('.live .prose')?.innerText.length > 20", 120)
            await page.wait(IDLE, 120)
            facts = await chat.read_facts()
            assert float(facts["speed"].split()[0]) > 0
            assert int(facts["output"]) > 20
            assert facts["finish"] in ("stop", "length")
            await chat.set_field("max_tokens", "1500")
            await chat.send("Tell me a very long story.")
            await page.wait("document.querySelector('.turn:last-child .prose').innerText.length > 20", 120)
            await page.press("Escape")
            await page.wait(IDLE)
            assert (await chat.read_facts())["finish"] == "stopped by you"
            await asyncio.to_thread(server.wait_until_idle)
            await chat.set_field("max_tokens", "40")
            await chat.press_button("Regenerate")
            await page.wait(
                f"{IDLE} && document.querySelectorAll('.turn:last-child .facts div').length === 5", 120
            )
            facts = await chat.read_facts()
            # The conversation up to here is in the prefix cache.
            assert int(facts["prompt"].split("(")[1].split()[0]) > 0
            assert facts["output"] == "40"
            assert page.problems == []

    asyncio.run(use())


@pytest.mark.skipif(SCREENSHOT not in os.environ, reason=f"needs {SCREENSHOT}=<path of the picture to write>")
def test_the_picture_for_the_readme(devtools: str, server: Server) -> None:
    questions = (
        "How do I reverse a string in Python?",
        "Give me three tips for better sleep, as a numbered list.",
    )

    async def use() -> bytes:
        async with open_page(devtools, f"{server.url}/", width=1280, height=800, scale=2) as page:
            chat = Chat(page)
            await page.wait(READY)
            await chat.set_field("temperature", "0")
            for number, question in enumerate(questions, 1):
                await chat.send(question)
                await page.wait(f"document.querySelectorAll('.foot').length === {number}", 240)
            # The colours of the button change smoothly.
            await page.evaluate("Promise.all(document.getAnimations().map((a) => a.finished))")
            return await page.screenshot()

    picture = asyncio.run(use())
    assert len(picture) < MAX_PICTURE_BYTES
    Path(os.environ[SCREENSHOT]).write_bytes(picture)
