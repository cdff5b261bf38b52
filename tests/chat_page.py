"""The chat page in a browser, as the person in front of it uses it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import attrs

from astrai_server.config import Settings
from astrai_server.keys import KeyRing
from browser import Page, open_page
from fake_engine import Client, FakeEngine, serve

READY = "document.querySelector('#status').dataset.state === 'ready'"
IDLE = "!document.querySelector('.busy') && document.querySelector('.turn:last-child .foot')"


@attrs.frozen
class Chat:
    """One tab with the page in it."""

    page: Page

    async def send(self, text: str) -> None:
        """Type a message and press Enter."""
        await self.page.evaluate("document.querySelector('#message').focus()")
        await self.page.type(text)
        await self.page.press("Enter")

    async def ask(self, text: str) -> None:
        """``send``, and wait until the page is idle again."""
        await self.send(text)
        await self.page.wait(IDLE)

    async def wait_for_answer(self, text: str) -> None:
        """Wait until the last answer reads ``text``, whether or not it goes on."""
        last = "document.querySelector('.turn:last-child .prose')?.innerText"
        await self.page.wait(f"{last} === {json.dumps(text)}")

    async def press_button(self, label: str) -> None:
        """Press the last button of that text, wherever it is."""
        found = (
            f"[...document.querySelectorAll('button')].findLast((b) => b.innerText === {json.dumps(label)})"
        )
        await self.page.evaluate(f"{found}.click()")

    async def set_field(self, name: str, value: str) -> None:
        """Put a value into a field of the settings, as if it was entered."""
        await self.page.evaluate(
            f"""{{
                const field = document.getElementById({json.dumps(name)});
                field.value = {json.dumps(value)};
                for (const name of ["input", "change"])
                    field.dispatchEvent(new Event(name, {{ bubbles: true }}));
            }}"""
        )

    async def read_facts(self) -> dict[str, str]:
        """Names and values below the last answer."""
        rows = "[...document.querySelectorAll('.turn:last-child .facts div')]"
        return dict(
            await self.page.evaluate(f"{rows}.map((row) => [...row.children].map((e) => e.innerText))")
        )

    async def count(self, selector: str) -> int:
        """Number of elements."""
        return int(await self.page.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))


Use = Callable[[Chat, Client], Coroutine[Any, Any, None]]


def visit(
    devtools: str,
    engine: FakeEngine | None,
    use: Use,
    *,
    settings: Settings | None = None,
    keys: KeyRing | None = None,
    **screen: Any,
) -> None:
    """Run ``use`` on the page of a real server.

    Args:
        devtools: of a running browser.
        engine: None is one that still loads.
        use: gets the page, and a client of its server.
        settings: of the server.
        keys: who may use it.
        screen: as ``Page.show_on`` takes it.
    """

    async def run() -> None:
        async with (
            serve(engine, settings, keys) as client,
            open_page(devtools, f"{client.url}/", **screen) as page,
        ):
            await use(Chat(page), client)

    asyncio.run(run())


async def wait_for_cancel(engine: FakeEngine, client: Client) -> None:
    """Wait until a task was cancelled and no request is inside any more."""
    async with asyncio.timeout(10):
        while client.gate.num_inside or not engine.num_cancelled:
            await asyncio.sleep(0.01)
