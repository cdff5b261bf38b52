"""What ``astrai chat`` remembers and shows, without a server and a terminal."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from astrai_server.chat.answer import Answer
from astrai_server.chat.control import strip_controls
from astrai_server.chat.conversation import Conversation
from astrai_server.chat.markdown import MarkdownBlocks, Tail
from astrai_server.chat.parameter import check_name, parse_value, suggest
from astrai_server.chat.prompt import read_question
from astrai_server.chat.reply import Delta, Usage

# Statistics


def make_answer(*deltas: Delta, start_s: float = 10.0, step_s: float = 0.5) -> Answer:
    answer = Answer(question="q", asked_s=start_s)
    for i, delta in enumerate(deltas):
        answer.add(delta, start_s + step_s * (i + 1))
    return answer


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            make_answer(Delta(text="a"), Delta(text="b"), Delta(finish_reason="stop", usage=Usage(9, 3, 4))),
            "9 tokens in (4 cached), 3 out, first after 500 ms, then 4.0 tokens/s",
        ),
        (
            make_answer(Delta(text="a", usage=Usage(9, 30), finish_reason="length"), step_s=2.0),
            "9 tokens in, 30 out, first after 2.0 s, cut at the token limit",
        ),
        (
            make_answer(Delta(reasoning="a"), Delta(text="b"), Delta(text="c"), Delta(finish_reason="odd\n")),
            "3 chunks out; the server counts no tokens, first after 500 ms, then 2.0 chunks/s, finish odd",
        ),
        (
            make_answer(Delta(text="a"), Delta(finish_reason="stopped")),
            "1 chunk out, first after 500 ms, stopped",
        ),
        (make_answer(Delta(usage=Usage(9, 0))), "9 tokens in, 0 out"),
    ],
)
def test_statistics_say_what_is_known(answer: Answer, text: str) -> None:
    assert answer.describe() == text


# Conversations


def said(conversation: Conversation, question: str = "?", **options: bool) -> list[str]:
    return [message["content"] for message in conversation.list_messages(question, **options)]


def test_a_retry_replaces_the_last_answer_once_there_is_another() -> None:
    conversation = Conversation(system="be brief")
    conversation.record(Answer(question="q1", asked_s=0, text="a1"))
    conversation.record(Answer(question="q2", asked_s=0, text="a2"))
    assert conversation.last_question == "q2"
    assert said(conversation, "q2", is_retry=True) == ["be brief", "q1", "a1", "q2"]
    conversation.record(Answer(question="q2", asked_s=0), is_retry=True)
    assert said(conversation) == ["be brief", "q1", "a1", "q2", "a2", "?"]
    conversation.record(Answer(question="q2", asked_s=0, text="b2"), is_retry=True)
    assert said(conversation) == ["be brief", "q1", "a1", "q2", "b2", "?"]


def test_a_question_without_an_answer_is_repeated_or_forgotten() -> None:
    conversation = Conversation()
    conversation.record(Answer(question="q1", asked_s=0, text="a1"))
    conversation.record(Answer(question="q2", asked_s=0))
    assert conversation.last_question == "q2"
    assert said(conversation) == ["q1", "a1", "?"]
    assert said(conversation, "q2", is_retry=True) == ["q1", "a1", "q2"]
    assert conversation.undo() == "q2"
    assert conversation.undo() == "q1"
    assert conversation.undo() is None
    assert said(conversation) == ["?"]


def test_a_saved_conversation_is_json_that_steers_no_terminal() -> None:
    conversation = Conversation(system="s")
    conversation.record(
        Answer(question="q", asked_s=0, text="é\x1b[2J\x9b", reasoning="hm", finish_reason="stopped")
    )
    text = conversation.to_json(model="m")
    assert json.loads(text) == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": "é\x1b[2J\x9b",
                "finish_reason": "stopped",
                "reasoning_content": "hm",
            },
        ],
    }
    assert strip_controls(text) == text
    assert "é" in text


def test_half_a_character_does_not_keep_a_conversation_from_being_saved() -> None:
    conversation = Conversation()
    conversation.record(Answer(question="\udc80", asked_s=0, text="\ud83d\ude00\ud83d"))
    messages = json.loads(conversation.to_json().encode())["messages"]
    assert [message["content"] for message in messages] == ["\ufffd", "😀\ufffd"]


# Parameters


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.2", 0.2),
        ("7", 7),
        ("true", True),
        ("null", None),
        ('["a", "b"]', ["a", "b"]),
        ('{"50": -100}', {"50": -100}),
        ("END", "END"),
        ('"3"', "3"),
        ("[unfinished", "[unfinished"),
    ],
)
def test_values_are_json_or_text(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[1, NaN]"])
def test_numbers_that_json_cannot_carry_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="wanted a number that JSON can carry, got"):
        parse_value(text)


def test_fields_that_the_chat_makes_itself_cannot_be_set() -> None:
    for name in ("messages", "stream", "model", "n", "tools"):
        with pytest.raises(ValueError, match=f"{name} cannot be set: "):
            check_name(name)
    with pytest.raises(ValueError, match="wanted the name of a parameter"):
        check_name("0.2")
    check_name("whatever_the_server_knows")


def test_a_misspelt_parameter_is_noticed() -> None:
    assert suggest("temprature") == "temperature"
    assert suggest("temperature") is None
    assert suggest("chat_template_kwargs") is None


# Questions of several lines


@pytest.mark.parametrize(
    ("lines", "question"),
    [
        (["a"], "a"),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (["\\", ""], "\n"),
        (["x \\\\"], "x \\\\"),
        (["a\\"], "a"),
        (["pasted\nblock"], "pasted\nblock"),
    ],
)
def test_a_backslash_continues_a_line(lines: list[str], question: str) -> None:
    left, prompts = iter(lines), []

    def read_line(prompt: str) -> str:
        prompts.append(prompt)
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    assert read_question(read_line) == question
    assert prompts[:2] == ["> ", "| "][: len(prompts)]


# Markdown


def render(blocks: list[Any]) -> list[str]:
    console = Console(file=io.StringIO(), width=60, color_system=None)
    texts = []
    for block in blocks:
        with console.capture() as capture:
            console.print(block)
        texts.append(capture.get())
    return texts


DOCUMENT = """# Title

Text with **bold**, `code`, <b>HTML</b> and a [link](https://example.org).
#hashtag in the same paragraph

1. one
   ```sh
   ls
   ```

2. two
| a | b |
|---|---|
| 1 | 2 |

```python
# no title

x = 1
```
Setext
---
> quoted\u2028still
***
last *line"""


@pytest.mark.parametrize("seed", range(20))
def test_growing_markdown_ends_up_as_it_does_in_one_piece(seed: int) -> None:
    whole = MarkdownBlocks()
    whole.feed(DOCUMENT)
    expected = render(whole.take_rest())
    growing = MarkdownBlocks()
    blocks = []
    rng, rest = random.Random(seed), DOCUMENT
    while rest:
        size = rng.choice((1, 1, 2, 5, 20))
        growing.feed(rest[:size])
        rest = rest[size:]
        growing.show_rest()
        blocks += growing.take_done()
    # The last line is not whole, so the block before it is not done either.
    assert len(blocks) == len(expected) - 2
    assert render(blocks + growing.take_rest()) == expected


def test_html_and_link_targets_are_shown() -> None:
    blocks = MarkdownBlocks()
    blocks.feed("use <div> and [this](https://example.org)\n\n<p>\nblock\n</p>\n\n&#27;[31m &#x9b;31m")
    text = "".join(render(blocks.take_rest()))
    assert "use <div> and this (https://example.org)" in text
    assert "<p>" in text
    assert strip_controls(text) == text


MARKUP = st.lists(st.sampled_from((*"*_`#>-|[]()!<&\\ \n\tx1.:~\u2028漢", "&#27;", "```", "\n\n", "|-|\n")))


@given(MARKUP, st.sampled_from((1, 2, 10, 80)))
def test_no_text_is_too_odd_for_markdown(markup: list[str], width: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=2, color_system=None)
    blocks = MarkdownBlocks()
    for piece in markup:
        blocks.feed(piece)
        console.print(Tail(blocks.show_rest(), is_continued=True))
        console.print(*blocks.take_done())
    console.print(*blocks.take_rest())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert strip_controls(shown) == shown


def test_blocks_have_no_empty_lines_around_them_and_no_blanks_behind() -> None:
    blocks = MarkdownBlocks()
    blocks.feed(DOCUMENT)
    for text in render(blocks.take_rest()):
        lines = text.removesuffix("\n").split("\n")
        assert lines[0].strip()
        assert lines[-1].strip()
        assert all(line == line.rstrip() for line in lines)
