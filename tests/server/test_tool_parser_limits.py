"""The parser of calls where answers go wrong, stop, or are long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType

import attrs
import pytest

from astrai_server.answer import CallArguments, CallStart, Text
from astrai_server.tools import parser as parser_module
from astrai_server.tools.format import choose_tool_format
from astrai_server.tools.parser import ToolFormat
from tool_answers import FORMATS, Answer, join, make, read, read_pieces, tag, write

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
