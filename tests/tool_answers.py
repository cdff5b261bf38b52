"""Answers with calls of tools, good and bad, and what a parser makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

from astrai_server.answer import CallArguments, CallStart, Piece, Text
from astrai_server.tools.parser import ToolCallParser, ToolFormat

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
