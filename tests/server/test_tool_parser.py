"""Calls found in answers: the same whatever the pieces, and never a broken one."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from types import FrameType
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_server.answer import CallArguments, CallStart, Piece, Text
from astrai_server.tools import parser as parser_module
from astrai_server.tools.format import choose_tool_format
from astrai_server.tools.parser import MAX_SPACE, ToolCallParser, ToolFormat

NAMES = ("f", "get_weather", "name")
FORMATS: tuple[ToolFormat, ...] = ("hermes", "json", "auto")

# What answers with calls, good and bad, are made of.
FRAGMENTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool_call",
            "</tool",
            "<",
            "<|python_tag|>",
            "<|py",
            " ",
            "\n",
            "x",
        ),
        '{"name": "f", "arguments": {}}',
        '{"name": "f", "parameters": {"a": [1, 2.5e3], "b": "\\u00e9"}}',
        '{"arguments": {"a": 1}, "name": "get_weather"}',
        '{"name": "nope", "arguments": {}}',
        '{"name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": \\"b\\\\n\\"}"}',
        '{"name": "f", "arguments": "{\\"a\\": 1"}',
        *('{"name": "f", "arguments": ', '{"name": "', 'f"', '"arguments": ', '{"', 'a": ', '"b', '", '),
        *("{", "}", "[", "]", ",", ";", ":", '"', "\\", "\\ud83d", "\\ude00", "null", "tr", "true", "1", "-"),
        "\x01",
    ]
)
ANSWERS = st.lists(FRAGMENTS, max_size=16).map("".join)


@attrs.frozen
class Answer:
    """What a client has when all pieces of an answer are joined."""

    parts: tuple[str | int, ...]
    """Text, and the number of each call, in order."""
    calls: tuple[tuple[str, str, str], ...]
    """Id, name and arguments."""

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def named(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]


def make(tool_format: ToolFormat = "hermes", is_parallel: bool = True) -> ToolCallParser:
    ids = iter(range(10**9))
    return ToolCallParser(
        NAMES, tool_format=tool_format, is_parallel=is_parallel, new_id=lambda: f"id{next(ids)}"
    )


def join(pieces: Iterable[Piece]) -> Answer:
    parts: list[str | int] = []
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, Text):
            assert piece.text
            if parts and isinstance(parts[-1], str):
                parts[-1] += piece.text
            else:
                parts.append(piece.text)
        elif isinstance(piece, CallStart):
            assert piece.index == len(calls)
            calls.append([piece.id, piece.name, ""])
            parts.append(piece.index)
        else:
            assert isinstance(piece, CallArguments)
            assert piece.text
            assert parts[-1] == piece.index == len(calls) - 1
            calls[-1][2] += piece.text
    return Answer(tuple(parts), tuple((call_id, name, arguments) for call_id, name, arguments in calls))


def read_pieces(
    pieces: Sequence[str], tool_format: ToolFormat = "hermes", is_parallel: bool = True
) -> Answer:
    parser = make(tool_format, is_parallel)
    found = [piece for text in pieces for piece in parser.push(text)]
    answer = join([*found, *parser.flush()])
    assert parser.num_calls == len(answer.calls)
    return answer


def read(text: str, tool_format: ToolFormat = "hermes", is_parallel: bool = True) -> Answer:
    """The answer, from one push and from one push a character."""
    whole = read_pieces([text], tool_format, is_parallel)
    assert read_pieces(list(text), tool_format, is_parallel) == whole
    return whole


def tag(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def write(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


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


# What only looks like a call


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call> </tool_call>",
        "Write <tool_call> before a call and </tool_call> after it.",
        "<tool_call>\nf(1)\n</tool_call>",
        tag(write("nope", {"a": 1})),
        tag('{"name": 5, "arguments": {}}'),
        tag('{"name": "f", "arguments": [1]}'),
        tag('{"name": "f", "arguments": 1}'),
        tag('{"name": "f", "arguments": "[1]"}'),
        tag('{"name": "f", "arguments": "x"}'),
        tag('{"name": "f", "arguments": false}'),
        tag('{"arguments": {"a": 1}}'),
        tag('{"arguments": {"a": 1 "name": "f"}'),
        tag('{"arguments": "{\\"a\\": 1", "name": "f"}'),
        tag('{"name": "f" "arguments": {}}'),
        tag('{"name": "f",}'),
        tag("{}"),
        tag("[]"),
        tag('[["f"]]'),
        '<tool_call>{"name": "f"',
        '<tool_call>{"name": "f", "arguments": ',
        '<tool_call>{"arguments": {"a": 1}, "na',
        "<tool_call",
        "a < b",
        write("nope", {"a": 1}),
        '{"name": "f", "age": 5',
        '{"answer": 42}',
        "[1, 2, 3]",
        "[link](https://example.org)",
        "<|python_tag|>print(1)",
        "<|python",
        "  \n ",
        "",
    ],
)
def test_what_only_looks_like_a_call_is_delivered_verbatim(text: str, tool_format: ToolFormat) -> None:
    assert read(text, tool_format) == Answer((text,) if text else (), ())


def test_a_call_after_one_that_was_none_is_found() -> None:
    call = tag(write("f", {}))
    assert read(f"{tag(write('nope', {}))}\n{call}").parts == (tag(write("nope", {})), 0)
    assert read(f"<tool_call><tool_call>{write('f', {})}").parts == ("<tool_call>", 0)
    assert read(f"{write('nope', {})} {call}", "auto").parts == (write("nope", {}), 0)


def test_an_unknown_call_in_the_tag_of_a_known_one_is_text_without_the_tag() -> None:
    known, unknown = write("f", {}), write("nope", {"a": 1})
    assert read(f"<tool_call>{known}\n{unknown}\n</tool_call>\nDone.").parts == (0, f"{unknown}\n\nDone.")
    assert read(f"{known}; {unknown}", "json").parts == (0, unknown)


def test_each_format_reads_its_own_calls_only() -> None:
    tagged, plain = tag(write("f", {})), write("f", {})
    assert read(tagged, "json").parts == (tagged,)
    assert read(plain, "hermes").parts == (plain,)
    assert read(f"Here: {plain}", "auto").parts == (f"Here: {plain}",)
    assert read(f"{plain} and {tagged}", "auto").parts == (0, "and", 1)


# Calls that go wrong


@pytest.mark.parametrize(
    ("arguments", "closed"),
    [
        ('{"a": 1, "b": x}}', '{"a": 1}'),
        ('{"a": [1, {"b": "c" ', '{"a": [1, {"b": "c" }]}'),
        ('{"a": 12', "{}"),
        ('{"a": "x\\u00', '{"a": "x"}'),
        ('{"a": "x\\q"}}', '{"a": "x"}'),
        ('"{\\"a\\": 1, \\"b\\": x}"}', '{"a": 1}'),
        ('"{\\"a\\": \\"b', '{"a": "b"}'),
        ('"{\\"a\\": 1} and"}', '{"a": 1}'),
        ("{", "{}"),
    ],
)
def test_arguments_that_go_wrong_are_closed_and_their_rest_dropped(arguments: str, closed: str) -> None:
    text = f'Hm.\n<tool_call>{{"name": "f", "arguments": {arguments}'
    assert read(text) == Answer(("Hm.", 0), (("id0", "f", closed),))
    plain = text.removeprefix("Hm.\n<tool_call>")
    assert read(plain, "json") == Answer((0,), (("id0", "f", closed),))


def test_what_is_wrong_is_dropped_up_to_the_end_tag_only() -> None:
    broken = '{"name": "f", "arguments": {"a": 1, b} <tool_call> </tool_cal'
    answer = read(f"{tag(broken)}\nSo {tag(write('f', {}))}")
    assert answer.parts == (0, "So", 1)
    assert answer.named == [("f", {"a": 1}), ("f", {})]


def test_a_raw_line_break_in_an_argument_becomes_its_escape() -> None:
    assert read(tag('{"name": "f", "arguments": {"code": "a\nb"}}')).calls[0][2] == '{"code": "a\\nb"}'


# One call at a time


def test_after_the_only_call_nothing_more_is_wanted() -> None:
    parser = make(is_parallel=False)
    begin = '<tool_call>{"name": "f", "arguments": {"a": 1'
    parser.push(begin)
    assert not parser.is_done
    assert parser.push("}") == [CallArguments(0, '"a": 1}')]
    assert parser.is_done
    assert parser.push(f"}}</tool_call>text{tag(write('f', {}))}") == []
    assert parser.flush() == []
    assert parser.num_calls == 1


def test_parallel_calls_are_never_done() -> None:
    parser = make()
    parser.push(tag(write("f", {})) * 2)
    parser.flush()
    assert not parser.is_done
    assert parser.num_calls == 2


# Streaming


def test_a_call_starts_as_soon_as_its_name_is_known_and_its_arguments_begin() -> None:
    parser = make()
    assert parser.push('One <tool_call>\n{"name": "f"') == [Text("One")]
    assert parser.push(', "arguments": ') == []
    assert parser.push("{") == [CallStart(0, "id0", "f"), CallArguments(0, "{")]
    assert parser.push('"city": "Pa') == [CallArguments(0, '"city": "Pa')]
    assert parser.push('ris", "day') == [CallArguments(0, 'ris"')]
    assert parser.push('s": 1') == []
    assert parser.push("2") == []
    assert parser.push("}") == [CallArguments(0, ', "days": 12}')]
    assert parser.push("}\n</tool_call>\n") == []
    assert parser.flush() == []


def test_arguments_before_the_name_wait_for_it() -> None:
    parser = make()
    assert parser.push('<tool_call>{"arguments": {"a": 1}, "name": "f') == []
    assert parser.push('"') == [CallStart(0, "id0", "f"), CallArguments(0, '{"a": 1}')]


def test_one_push_gives_one_piece_of_each_kind() -> None:
    text = f"Text <tool_call> more{tag(write('f', {'a': [1, 2, {'b': 'c'}]}))}x <b> y"
    kinds = [type(piece) for piece in make().push(text)]
    assert kinds == [Text, CallStart, CallArguments, Text]


def test_text_is_held_back_only_while_a_tag_may_come() -> None:
    parser = make("auto")
    assert parser.push("a \n<tool") == [Text("a")]
    assert parser.push("s> b") == [Text(" \n<tools> b")]


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
@pytest.mark.parametrize("begin", ["", '{"arguments": {"a": "', '{"arguments": "{\\"a\\": \\"', '{"x'])
def test_what_may_become_a_call_is_held_back_to_a_limit(
    begin: str, tool_format: ToolFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parser_module, "MAX_HELD", 50)
    text = ("<tool_call>" if tool_format == "hermes" else "[") + begin + " " * 100
    assert read(text, tool_format) == Answer((text,), ())
    parser = make(tool_format)
    assert len(join(parser.push(text)).text) >= 50


def test_what_comes_after_the_flush_is_nothing() -> None:
    parser = make()
    assert parser.push("a<") == [Text("a")]
    assert parser.flush() == [Text("<")]
    assert parser.flush() == []
    assert parser.push("b") == []


# Cost


def count_steps(action: Callable[[], object]) -> int:
    steps = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal steps
        steps += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return steps


ATTACKS = {
    "text": "x",
    "white space": " ",
    "half tags": "<tool_call ",
    "tags": "<tool_call>",
    "tags and objects": '<tool_call>{"',
    "unknown calls": tag(write("nope", {})),
    "end tags": "</tool_call>",
    "quotes": '"',
    "brackets": "[",
    "calls": tag(write("f", {"a": "é"})),
}


@pytest.mark.parametrize("begin", ["", '<tool_call>{"name": "f", "arguments": {"a": "', '{"arguments": {"'])
@pytest.mark.parametrize("attack", ATTACKS)
def test_steps_grow_with_the_text_and_no_faster(attack: str, begin: str) -> None:
    def push(count: int) -> int:
        text = begin + (ATTACKS[attack] * count)[:count]
        return count_steps(lambda: read_pieces(list(text), "auto"))

    short, long = push(1_000), push(4_000)
    assert long <= 4.5 * short


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_megabyte_at_once_costs_no_more_than_its_length(attack: str) -> None:
    def measure(count: int) -> float:
        text = (ATTACKS[attack] * count)[:count]
        begin = time.process_time()
        read_pieces([text], "auto")
        return time.process_time() - begin

    # Sixteen times the text: quadratic cost would be 256 times. The rest is the clock's.
    measure(1 << 16)
    assert measure(1 << 20) <= 64 * max(measure(1 << 16), 0.002)


# Format


@attrs.frozen
class Template:
    tool_format: ToolFormat | None


@pytest.mark.parametrize(
    ("setting", "known", "chosen"),
    [
        ("auto", "hermes", "hermes"),
        ("auto", "json", "json"),
        ("auto", None, "auto"),
        ("hermes", "json", "hermes"),
        ("json", None, "json"),
    ],
)
def test_the_operators_format_wins_over_the_templates(
    setting: ToolFormat, known: ToolFormat | None, chosen: str
) -> None:
    assert choose_tool_format(setting, Template(known)) == chosen
