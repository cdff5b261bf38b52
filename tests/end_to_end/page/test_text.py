"""What models write, on the screen: Markdown, and attempts to be more than text."""

from __future__ import annotations

import json

from chat_page import Chat, visit
from fake_engine import Client, FakeEngine

# Markdown and the elements it becomes; attributes of presentation are left out.
CASES = {
    "plain *em* **strong** ***both*** ~~gone~~ `a*b*`": (
        "<p>plain <em>em</em> <strong>strong</strong> <strong><em>both</em></strong> <del>gone</del> "
        "<code>a*b*</code></p>"
    ),
    "_em_ __strong__ snake_case_name 2 * 3 * 4 \\*no\\*": (
        "<p><em>em</em> <strong>strong</strong> snake_case_name 2 * 3 * 4 *no*</p>"
    ),
    "**open and `open and *open": "<p>**open and `open and *open</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# A\n###### B": "<h3>A</h3><h6>B</h6>",
    "#no heading": "<p>#no heading</p>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n\n   more\n4. b\nlazy": "<ol><li><p>a</p><p>more</p></li><li>b<br>lazy</li></ol>",
    "In 1995\n1996. no list": "<p>In 1995<br>1996. no list</p>",
    "1. a\n\n2. b\n   ```\n   x\n   ```": ("<ol><li>a</li><li>b<pre><code>x</code></pre></li></ol>"),
    "```py\n<b>\n  *x*\n```\nend": "<pre><code>&lt;b&gt;\n  *x*</code></pre><p>end</p>",
    "~~~\nopen": "<pre><code>open</code></pre>",
    "see\n| a | b |\n|---|--:|\n| 1 | x\\|y |\n| 2 |": (
        "<p>see</p><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody>"
        "<tr><td>1</td><td>x|y</td></tr><tr><td>2</td><td></td></tr></tbody></table>"
    ),
    "a | b": "<p>a | b</p>",
    "[*x*](https://a.b/c_(d)) <http://e.f/> at https://g.h/i.": (
        '<p><a href="https://a.b/c_(d)"><em>x</em></a> <a href="http://e.f/">http://e.f/</a> at '
        '<a href="https://g.h/i">https://g.h/i</a>.</p>'
    ),
    "![pic](https://a.b/c.png)": '<p><a href="https://a.b/c.png">pic</a></p>',
    "[x](javascript:alert(1)) [y](/health) [z](data:text/html,x)": (
        "<p>[x](javascript:alert(1)) [y](/health) [z](data:text/html,x)</p>"
    ),
}

# The elements of the answer without those that only present, and with none but one attribute.
DESCRIBE = """(() => {
    const copy = document.querySelector(".turn:last-child .prose").cloneNode(true);
    for (const bar of copy.querySelectorAll(".code-bar")) bar.remove();
    for (const box of copy.querySelectorAll("div")) box.replaceWith(...box.childNodes);
    for (const element of copy.querySelectorAll("*"))
        for (const { name } of [...element.attributes]) if (name !== "href") element.removeAttribute(name);
    return copy.innerHTML;
})()"""

HOSTILE = """<img src=x onerror="window.hit=1"><script>window.hit=2</script>
<a href="javascript:window.hit=3">x</a> <style>*{display:none}</style> </div></body>

[a](javascript:window.hit=4) [b](JaVaScRiPt:window.hit=5) [c](java\tscript:window.hit=6) [d](  javascript:hit)
[e](data:text/html,<script>top.hit=7</script>) [f](//evil.example) [g](https://ok.example/"onclick="hit)
![h](x"onerror="hit) <javascript:window.hit=8> `<svg onload=window.hit=9>` **<b>** <https://ok.example/<b>>

```"><img src=x onerror=window.hit=10>
</code></pre><script>window.hit=11</script>
```

| <img src=x onerror=window.hit=12> | b |
|---|---|
| <iframe srcdoc="<script>top.hit=13</script>"> | d |
"""

LONG = "".join(CASES) + "\n\n".join(["", *CASES, "😀 👩‍👩‍👧 é", *CASES])


def test_markdown_becomes_elements(devtools: str) -> None:
    engine = FakeEngine()

    async def use(chat: Chat, _: Client) -> None:
        for source, wanted in CASES.items():
            engine.pieces = [source]
            await chat.page.click("#new")
            await chat.ask("hi")
            assert await chat.page.evaluate(DESCRIBE) == wanted, source
        assert chat.page.problems == []

    visit(devtools, engine, use)


def test_text_that_streams_in_ends_as_the_same_elements(devtools: str) -> None:
    engine = FakeEngine([LONG])

    async def use(chat: Chat, _: Client) -> None:
        await chat.ask("hi")
        whole = await chat.page.evaluate(DESCRIBE)
        engine.pieces, engine.gap_s = [LONG[i : i + 7] for i in range(0, len(LONG), 7)], 0.002
        await chat.ask("again")
        assert await chat.page.evaluate(DESCRIBE) == whole

    visit(devtools, engine, use)


def test_what_tries_to_be_more_than_text_stays_text(devtools: str) -> None:
    engine = FakeEngine([HOSTILE])

    async def use(chat: Chat, _: Client) -> None:
        page = chat.page
        await chat.ask(HOSTILE)
        # Events of elements that should not be there would come a moment later.
        await page.evaluate("new Promise((done) => setTimeout(done, 200))")
        assert await page.evaluate("window.hit") is None
        foreign = "#log :is(img, script, style, iframe, svg:not([aria-hidden]), b)"
        assert await chat.count(foreign) == 0
        names = "[...document.querySelectorAll('#log *')].flatMap((e) => e.getAttributeNames())"
        assert await page.evaluate(f"{names}.filter((name) => name.startsWith('on'))") == []
        links = await page.evaluate(
            "[...document.querySelectorAll('.prose a')].map((a) => [a.protocol, a.rel])"
        )
        assert links
        assert all(link == ["https:", "noopener noreferrer nofollow"] for link in links), links
        assert await page.evaluate("document.querySelector('.question .text').textContent") == HOSTILE
        for piece in (
            "<script>window.hit=2</script>",
            "[a](javascript:window.hit=4)",
            "</code></pre><script>",
        ):
            assert piece in await page.text(".prose")
        assert page.problems == []

    visit(devtools, engine, use)


def test_long_rows_of_unclosed_marks_do_not_hang_the_page(devtools: str) -> None:
    rows = [
        "*a " * 40000,
        "[" * 20000,
        "`" * 9000 + " " + "`a" * 5000,
        "> " * 9000,
        "- " * 9000,
        "_a" * 9000,
        "|" * 9000,
    ]
    engine = FakeEngine(["\n\n".join(rows)])

    async def use(chat: Chat, _: Client) -> None:
        await chat.ask("hi")
        assert "*a *a" in await chat.page.text(".prose")

    visit(devtools, engine, use)


def test_what_is_no_unicode_is_replaced_and_emoji_stay_whole(devtools: str) -> None:
    engine = FakeEngine(["👩‍", "👩‍👧", " 🚀"])

    async def use(chat: Chat, _: Client) -> None:
        await chat.page.evaluate("void (document.querySelector('#message').value = 'a\\ud800b 😀')")
        await chat.page.evaluate("document.querySelector('#message').setSelectionRange(9, 9)")
        await chat.ask("!")
        await chat.wait_for_answer("👩‍👩‍👧 🚀")

    visit(devtools, engine, use)
    assert engine.prompts == ["<user>a\ufffdb 😀!<assistant>"]


def test_code_and_answers_can_be_copied(devtools: str) -> None:
    source = "Do:\n\n```\na < b\n```"

    async def use(chat: Chat, _: Client) -> None:
        page = chat.page
        await chat.ask("hi")
        for label, text in (("Copy the code", "a < b"), ("Copy the answer", source)):
            await page.click(f"[aria-label='{label}']")
            await page.wait(
                f"document.querySelector('[aria-label={json.dumps(label)}]').innerText === 'Copied'"
            )
            await page.evaluate("document.querySelector('#message').select()")
            await page.paste()
            assert await page.evaluate("document.querySelector('#message').value") == text

    visit(devtools, FakeEngine([source]), use)
