"""Calls found in answers: the same whatever the pieces, and never a broken one."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_server.answer import Piece, Text
from astrai_server.tools.parser import MAX_SPACE, ToolFormat
from tool_answers import ANSWERS, FORMATS, NAMES, join, make, read, read_pieces, tag, write

# Any text


@given(text=ANSWERS, tool_format=st.sampled_from(FORMATS), is_parallel=st.booleans(), data=st.data())
def test_the_outcome_does_not_depend_on_the_pieces(
    text: str, tool_format: ToolFormat, is_parallel: bool, data: st.DataObject
) -> None:
    whole = read(text, tool_format, is_parallel)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6), label="cuts"))
    edges = [0, *cuts, len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    assert read_pieces(pieces, tool_format, is_parallel) == whole


@given(text=ANSWERS, tool_format=st.sampled_from(FORMATS), is_parallel=st.booleans())
def test_every_call_has_a_known_name_its_own_id_and_an_object(
    text: str, tool_format: ToolFormat, is_parallel: bool
) -> None:
    answer = read(text, tool_format, is_parallel)
    assert len(answer.calls) <= 1 or is_parallel
    assert len({call_id for call_id, _, _ in answer.calls}) == len(answer.calls)
    for name, arguments in answer.named:
        assert name in NAMES
        assert isinstance(arguments, dict)


@given(text=ANSWERS, tool_format=st.sampled_from(FORMATS))
def test_an_answer_without_calls_is_delivered_verbatim(text: str, tool_format: ToolFormat) -> None:
    answer = read(text, tool_format)
    if not answer.calls:
        assert answer.text == text


@given(text=ANSWERS, tool_format=st.sampled_from(FORMATS), is_parallel=st.booleans())
def test_reading_may_stop_as_soon_as_the_parser_is_done(
    text: str, tool_format: ToolFormat, is_parallel: bool
) -> None:
    parser, pieces = make(tool_format, is_parallel), list[Piece]()
    for char in text:
        if parser.is_done:
            break
        pieces += parser.push(char)
    assert join([*pieces, *parser.flush()]) == read(text, tool_format, is_parallel)


# Good calls


def random_value(rng: random.Random, depth: int) -> Any:
    words = [
        "</tool_call>",
        "<tool_call>",
        '{"',
        "}",
        '"',
        "\\",
        "\n",
        "\t",
        "é",
        "😀",
        "\u2028",
        "x",
        "\x00",
    ]
    kind = rng.randrange(7 if depth else 5)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice([-1, 1]) * rng.randrange(10 ** rng.choice([1, 5, 60]))
    if kind == 2:
        return rng.choice([0.5, -1e-9, 1.7976931348623157e308])
    if kind in (3, 4):
        return "".join(rng.choices(words, k=rng.randrange(8)))
    if kind == 5:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {"".join(rng.choices(words, k=3)): random_value(rng, depth - 1) for _ in range(rng.randrange(4))}


def random_call(rng: random.Random) -> tuple[str, tuple[str, Any]]:
    arguments = {f"k{i}": random_value(rng, 4) for i in range(rng.randrange(5))}
    ascii_only, indent = rng.choice([True, False]), rng.choice([None, 2])
    given: Any = arguments
    if rng.random() < 0.2:
        given = json.dumps(arguments, ensure_ascii=rng.choice([True, False]))
    name = rng.choice(NAMES)
    items = [("name", name), (rng.choice(["arguments", "parameters"]), given), ("id", random_value(rng, 2))]
    rng.shuffle(items)
    return json.dumps(dict(items), ensure_ascii=ascii_only, indent=indent), (name, arguments)


@pytest.mark.parametrize("seed", range(200))
def test_random_calls_are_read_whole(seed: int) -> None:
    rng = random.Random(seed)
    body, expected = random_call(rng)
    another, also_expected = random_call(rng)
    assert read(f"Well. {tag(body)}\n{tag(another)}").named == [expected, also_expected]
    assert read(f"{body}; {another}", "json").named == [expected, also_expected]


@pytest.mark.parametrize(
    "text",
    [
        tag('{"name": "f", "arguments": {"a": 1}}'),
        tag('{"arguments": {"a": 1}, "name": "f"}'),
        tag('{"name": "f", "parameters": {"a": 1}}'),
        tag('{"name": "f", "arguments": "{\\"a\\": 1}"}'),
        tag('{"id": 7, "name": "f", "why": ["name", {"arguments": 2}], "arguments": {"a": 1}, "z": null}'),
        tag('{"name": "f", "arguments": null, "parameters": {"a": 1}}'),
        tag('{"name": "f", "arguments": {"a": 1}, "name": "nope", "arguments": {"b": 2}}'),
        tag('{"\\u006eame": "\\u0066", "arguments": {"a": 1}}'),
        tag('[{"name": "f", "arguments": {"a": 1}}]'),
        '<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>',
        '<tool_call>{"name":"f","arguments":{"a": 1}}',
        '<tool_call>{"name":"f","arguments":{"a": 1}}</tool',
        '<tool_call>{"name":"f","arguments":{"a": 1}}} trailing </tool_call>',
        '<tool_call>{"name":"f","arguments":{"a": 1}</tool_call>',
        '<tool_call>{"name":"f","arguments":{"a": 1}, oops}</tool_call>',
    ],
)
def test_one_call_may_be_written_in_many_ways(text: str) -> None:
    answer = read(text)
    assert answer.calls == (("id0", "f", '{"a": 1}'),)
    assert answer.text == ""
    assert read(text, "auto") == answer


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f"}',
        '{"name": "f", "arguments": null}',
        '{"arguments": null, "name": "f"}',
        '{"name": "f", "arguments": ""}',
        '{"name": "f", "arguments": {}}',
        '{"name": "f", "arguments": "{}"}',
    ],
)
def test_no_arguments_are_an_empty_object(body: str) -> None:
    assert read(tag(body)).calls == (("id0", "f", "{}"),)


@pytest.mark.parametrize(
    "text",
    [
        "{0}\n{1}",
        "<tool_call>{0}</tool_call><tool_call>{1}</tool_call>",
        "<tool_call>\n{0}\n<tool_call>\n{1}\n</tool_call>",
        "<tool_call>{0}{1}</tool_call>",
        "<tool_call>\n{0}\n{1}\n</tool_call>",
        "<tool_call>[{0}, {1}]</tool_call>",
        "{0}; {1}",
        "{0}, {1}",
        "\n\n[{0},\n{1}]\n",
        "<|python_tag|>{0}; {1}",
        " <|python_tag|> [{0}, {1}]",
    ],
)
def test_several_calls_may_be_written_in_many_ways(text: str) -> None:
    text = text.replace("{0}", write("f", {"a": 1})).replace("{1}", write("get_weather", {}, "parameters"))
    answer = read(text, "auto")
    assert answer.named == [("f", {"a": 1}), ("get_weather", {})]
    assert answer.text == ""


def test_text_around_calls_is_delivered_without_the_white_space_between() -> None:
    call = tag(write("f", {}))
    answer = read(f"  First,\n\n{call}  \n then \n\t{call}\n{call}\n\nDone.\n")
    assert answer.parts == ("  First,", 0, "then", 1, 2, "Done.\n")
    assert read(f"\n\n{call}\n").parts == (0,)


def test_of_endless_white_space_only_the_end_is_held_back() -> None:
    call = tag(write("f", {}))
    for tool_format in ("hermes", "auto"):
        assert read(" " * 200 + call, tool_format).parts == (" " * (200 - MAX_SPACE), 0)
    parser = make()
    assert parser.push("x" + " " * 200) == [Text("x" + " " * (200 - MAX_SPACE))]
    assert read(" " * 200 + "{}", "json").text == " " * 200 + "{}"


def test_an_end_tag_inside_a_string_ends_nothing() -> None:
    arguments = {"a": "x</tool_call>y<tool_call>", "b": '"}</tool_call>'}
    assert read(tag(write("f", arguments)) + "z").parts == (0, "z")
    assert read(tag(write("f", arguments))).named == [("f", arguments)]
    assert read(tag(write("f", json.dumps(arguments)))).named == [("f", arguments)]
