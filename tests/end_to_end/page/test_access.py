"""Keyboard, assistive technology, themes, narrow screens."""

from __future__ import annotations

from typing import Any

import pytest

from astrai_triton.errors import ContextLengthError
from chat_page import IDLE, READY, Chat, visit
from fake_engine import Client, FakeEngine

EVERYTHING = """# Heading

Text with `code`, **strong**, and [a link](https://example.com/).

- item

> quote

```python
print("a line that is wider than a phone", "and than a tablet", "so that the block has to scroll by itself")
```

| wide | extraordinarily | exceptionally | tremendously | prodigiously | immeasurably | a | b | c | d | e |
|---|---|---|---|---|---|---|---|---|---|---|
| 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10 | 11 |

averyveryveryveryveryveryveryveryveryveryveryveryverylongword `andsomeveryveryveryveryveryverylongcode`
"""

CONTROLS = frozenset(
    {"button", "link", "textbox", "slider", "spinbutton", "searchbox", "checkbox", "combobox"}
)

# Every visible text with the contrast of its colour against what lies below, if that is less than AA asks.
LOW_CONTRAST = """(() => {
    const parse = (color) => {
        const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
        return { rgb: [r, g, b], a };
    };
    const luminance = (rgb) => {
        const [r, g, b] = rgb.map((c) => c / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const backgroundOf = (element) => {
        for (let e = element; e; e = e.parentElement) {
            const { rgb, a } = parse(getComputedStyle(e).backgroundColor);
            if (a === 1) return rgb;
            if (a !== 0) throw new Error("a translucent background");
        }
    };
    const low = [];
    const check = (element, color, text) => {
        const [a, b] = [luminance(parse(color).rgb), luminance(backgroundOf(element))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        checked += 1;
        if (ratio < 4.5) low.push([text, ratio]);
    };
    let checked = 0;
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
        if (text && element.checkVisibility() && !element.closest(".sr, script, style, noscript"))
            check(element, getComputedStyle(element).color, text);
    }
    for (const field of document.querySelectorAll("[placeholder]"))
        if (field.checkVisibility())
            check(field, getComputedStyle(field, "::placeholder").color, field.placeholder);
    return { low, checked };
})()"""


async def fill(chat: Chat, engine: FakeEngine) -> None:
    """A conversation with one of everything, and an error."""
    engine.pieces = [EVERYTHING]
    await chat.page.wait(READY)
    await chat.ask("hi " + "long" * 60)
    engine.refuse = ContextLengthError(5000, 4096)
    await chat.ask("more")
    assert await chat.count(".trouble") == 1


def test_the_keyboard_alone_is_enough(devtools: str) -> None:
    engine = FakeEngine(["Half", " of it"])
    engine.is_held = True

    async def use(chat: Chat, _: Client) -> None:
        page = chat.page
        await page.wait(READY)
        await page.type("one")
        await page.press("Enter", shift=True)
        await page.type("two")
        await page.press("Enter")
        await chat.wait_for_answer("Half")
        await page.press("Escape")
        await page.wait(IDLE)
        assert await page.evaluate("document.activeElement.id") == "message"
        await press_until(chat, "Regenerate", shift=True)
        engine.is_held = False
        await page.press("Enter")
        await page.wait(IDLE)
        await chat.wait_for_answer("Half of it")
        await press_until(chat, "Settings", shift=True)
        await page.press(" ")
        assert await page.evaluate("document.activeElement.id") == "system"
        await page.press("Escape")
        assert await page.evaluate("document.activeElement.innerText") == "Settings"
        assert await page.evaluate("document.querySelector('#settings').hidden")

    visit(devtools, engine, use)
    assert engine.prompts == ["<user>one\ntwo<assistant>"] * 2


async def press_until(chat: Chat, label: str, *, shift: bool = False) -> None:
    """Go on with Tab until the control of that name has the focus."""
    name = "(document.activeElement.ariaLabel || document.activeElement.innerText || '').trim()"
    for _ in range(40):
        if await chat.page.evaluate(name) == label:
            return
        await chat.page.press("Tab", shift=shift)
    raise AssertionError(f"Tab does not get to {label}")


def test_tab_starts_with_a_link_past_everything_and_the_focus_is_always_seen(devtools: str) -> None:
    engine = FakeEngine()
    seen = """(() => {
        const element = document.activeElement, style = getComputedStyle(element);
        const box = element.getBoundingClientRect(), composer = document.querySelector("#composer");
        const hasLine = element.id === "message"
            ? getComputedStyle(composer).borderTopColor !== "rgb(140, 135, 126)"
            : style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
        const name = element.id || element.className || element.tagName;
        return { name, isSeen: hasLine && box.bottom > 0 && box.top < innerHeight };
    })()"""

    async def use(chat: Chat, _: Client) -> None:
        page = chat.page
        await fill(chat, engine)
        # A mouse would make the browser hide where the focus is.
        await page.evaluate(
            "document.querySelector('#toggle').click(), document.querySelector('.skip').focus()"
        )
        names = []
        for _ in range(60):
            # The colours of the frame change smoothly.
            await page.evaluate("Promise.all(document.getAnimations().map((a) => a.finished.catch(() => 0)))")
            found = await page.evaluate(seen)
            assert found["isSeen"], (found["name"], names)
            names.append(found["name"])
            if found["name"] == "message":
                break
            await page.press("Tab")
        assert names[:4] == ["skip", "new", "toggle", "theme"]
        assert {"system", "temperature", "key", "scroller", "act", "pill"} <= set(names)
        await page.evaluate("document.querySelector('.skip').focus()")
        await page.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "message"

    visit(devtools, engine, use)


def test_every_control_has_a_name_and_every_part_a_landmark(devtools: str) -> None:
    engine = FakeEngine()

    async def use(chat: Chat, _: Client) -> None:
        await fill(chat, engine)
        await chat.page.click("#toggle")
        nodes = await chat.page.read_accessibility_tree()
        controls = [node for node in nodes if node["role"] in CONTROLS]
        assert len(controls) >= 17
        assert [node for node in controls if not node["name"].strip()] == []
        named = {(node["role"], node["name"]) for node in nodes}
        assert named >= {
            ("complementary", "Settings"),
            ("region", "Conversation"),
            ("log", "Messages"),
            ("form", "Message"),
            ("textbox", "Message"),
            ("button", "Send"),
            ("slider", "Temperature"),
            ("spinbutton", "Seed"),
            ("textbox", "API key"),
            ("article", "You"),
            ("article", "Answer"),
            ("columnheader", "wide"),
            ("button", "Copy the code"),
        }
        roles = [node["role"] for node in nodes]
        assert roles.count("main") == roles.count("banner") == 1
        toggle = next(node for node in nodes if node["name"] == "Settings" and node["role"] == "button")
        assert toggle["properties"]["expanded"] is True
        assert await chat.page.evaluate("document.documentElement.lang") == "en"

    visit(devtools, engine, use)


def test_an_answer_is_announced_once_and_whole(devtools: str) -> None:
    engine = FakeEngine(["Hel", "lo", " **you**"], gap_s=0.03)

    async def use(chat: Chat, _: Client) -> None:
        await chat.page.wait(READY)
        await chat.page.evaluate(
            """void (window.said = [], new MutationObserver(() => {
                window.said.push(document.querySelector("#announcer").textContent);
            }).observe(document.querySelector("#announcer"), { childList: true, characterData: true }))"""
        )
        await chat.ask("hi")
        engine.refuse = ContextLengthError(5000, 4096)
        await chat.ask("more")
        said: list[str] = await chat.page.evaluate("window.said")
        assert said[:3] == ["Waiting for the answer", "Answer: Hello you", "Waiting for the answer"]
        assert said[3].startswith("Error: ")
        assert len(said) == 4
        # Nothing else of the conversation is live.
        assert await chat.count("#log :is([aria-live], [role=status], [role=alert], output)") == 0
        assert await chat.page.evaluate("document.querySelector('#log').ariaLive") == "off"

    visit(devtools, engine, use)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_the_contrast_that_aa_asks_for(devtools: str, theme: str) -> None:
    engine = FakeEngine()

    async def use(chat: Chat, _: Client) -> None:
        page = chat.page
        await page.call("Emulation.setEmulatedMedia", features=prefer(theme, "reduce"))
        await page.wait(READY)
        start = await page.evaluate(LOW_CONTRAST)
        await fill(chat, engine)
        await page.click("#toggle")
        full = await page.evaluate(LOW_CONTRAST)
        assert start["low"] == full["low"] == []
        assert start["checked"] > 10
        assert full["checked"] > 60

    visit(devtools, engine, use)


def prefer(theme: str, motion: str) -> list[dict[str, Any]]:
    """Media features of a system that prefers these."""
    return [
        {"name": "prefers-color-scheme", "value": theme},
        {"name": "prefers-reduced-motion", "value": motion},
    ]


def test_the_theme_is_the_systems_until_it_is_switched(devtools: str) -> None:
    background = "getComputedStyle(document.body).backgroundColor"

    async def use(chat: Chat, _: Client) -> None:
        page = chat.page
        dark = await page.evaluate(background)
        assert (
            await page.evaluate("document.querySelector('#theme').ariaLabel") == "Switch to the light theme"
        )
        await page.show_on(1280, 800, theme="light")
        light = await page.evaluate(background)
        assert light != dark
        await page.click("#theme")
        assert await page.evaluate(background) == dark
        await page.reload()
        assert await page.evaluate(background) == dark

    visit(devtools, FakeEngine(), use, theme="dark")


def test_nothing_moves_where_less_motion_is_wanted(devtools: str) -> None:
    engine = FakeEngine(["Half", " of it"])
    engine.is_held = True

    async def use(chat: Chat, _: Client) -> None:
        await chat.send("hi")
        await chat.wait_for_answer("Half")
        moving = "document.getAnimations().length"
        assert await chat.page.evaluate(moving) > 0
        await chat.page.call("Emulation.setEmulatedMedia", features=prefer("light", "reduce"))
        assert await chat.page.evaluate(moving) == 0

    visit(devtools, engine, use)


@pytest.mark.parametrize("width", [360, 390, 768])
def test_a_narrow_screen_shows_everything_without_scrolling_sideways(devtools: str, width: int) -> None:
    engine = FakeEngine()

    async def use(chat: Chat, _: Client) -> None:
        page = chat.page
        await fill(chat, engine)
        await check_width(chat, width)
        for wide in (".code pre", ".table"):
            moved = "(e => (e.scrollLeft = 9, getComputedStyle(e).overflowX + e.scrollLeft))"
            assert await page.evaluate(f"{moved}(document.querySelector('{wide}'))") == "auto9"
        # Fingers: 24 by 24 CSS pixels at the least, but for links inside of text.
        small = """[...document.querySelectorAll("button, input, textarea")]
            .filter((e) => e.checkVisibility())
            .map((e) => [e.id || e.innerText || e.ariaLabel, e.getBoundingClientRect()])
            .filter(([, box]) => box.width < 24 || box.height < 24).map(([name]) => name)"""
        assert await page.evaluate(small) == []
        await page.click("#toggle")
        await check_width(chat, width)
        assert await page.evaluate(small) == []
        assert await page.evaluate("document.querySelector('main').inert")
        await page.click("#close")
        assert not await page.evaluate("document.querySelector('main').inert")
        assert await page.evaluate("document.activeElement.id") == "toggle"

    visit(devtools, engine, use, width=width, height=740, is_mobile=True)


async def check_width(chat: Chat, width: int) -> None:
    """Nothing sticks out, and nothing scrolls sideways but code and tables."""
    assert await chat.page.evaluate("document.documentElement.scrollWidth") == width
    for element in ("#scroller", "#log", "main", "header", "#settings", "#composer"):
        sides = f"(e => [e.scrollWidth, e.clientWidth])(document.querySelector('{element}'))"
        inner, outer = await chat.page.evaluate(sides)
        assert inner <= outer, element
