"""Calls that must be valid under a schema, from a model that would rather say anything else."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from answers import (
    CHAT,
    END,
    MESSAGES,
    is_valid,
    read_one,
    run_engine,
    run_wild,
    send,
    send_together,
    shape,
)
from fakes import answer_script


def offer(path: str, schemas: dict[str, Any], *, strict: bool = False) -> list[dict[str, Any]]:
    """Tools in the words of either protocol."""
    if path == MESSAGES:
        return [{"name": name, "input_schema": schema, "strict": strict} for name, schema in schemas.items()]
    functions = [{"name": name, "parameters": schema, "strict": strict} for name, schema in schemas.items()]
    return [{"type": "function", "function": function} for function in functions]


def choose(path: str, kind: Literal["required", "named"]) -> Any:
    if path == CHAT:
        return "required" if kind == "required" else {"type": "function", "function": {"name": "g"}}
    return {"type": "any"} if kind == "required" else {"type": "tool", "name": "g"}


PLACE = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
    "required": ["x", "unit"],
    "additionalProperties": False,
}
SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "note": {"type": "string", "maxLength": 9}},
    "required": ["on"],
    "additionalProperties": False,
}
TOOLS = {"f": SWITCH, "g": PLACE}


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
@pytest.mark.parametrize("kind", ["required", "named"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_call_that_is_asked_for_comes_whatever_the_model_prefers(
    path: str, kind: Literal["required", "named"], tool_format: Any
) -> None:
    fields = {"tools": offer(path, TOOLS), "tool_choice": choose(path, kind), "temperature": 1, "top_k": 0}
    bodies = [fields | {"content": str(i), "stream": i % 2 == 0, "max_tokens": 900} for i in range(4)]
    with run_wild() as engine:
        answers = send_together(engine, path, *bodies, tool_format=tool_format)
    readings = [read_one(answer) for answer in answers]
    ended = [reading for reading in readings if reading.reason in ("tool_calls", "tool_use")]
    assert ended
    for reading in ended:
        assert reading.text == ""
        assert reading.calls
        for name, arguments in reading.calls:
            assert name == "g" if kind == "named" else name in TOOLS
            assert is_valid(arguments, TOOLS[name])
    if kind == "named":
        assert all(len(reading.calls) <= 1 for reading in readings)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_strict_call_is_valid_once_it_begins(path: str, stream: bool) -> None:
    """The model begins a call; what it would like to write after that is no JSON at all."""
    script = answer_script({END: 'Let me see. <tool_call>\n{"name": "g", "arguments": NO! <tool_call> NO!'})
    fields = {"tools": offer(path, TOOLS, strict=True), "max_tokens": 300}
    with run_engine(script, max_seq_len=4096) as engine:
        reading = read_one(send(engine, path, stream=stream, **fields))
    assert reading.text == "Let me see."
    assert reading.calls
    for name, arguments in reading.calls:
        assert is_valid(arguments, TOOLS[name])


def test_strict_calls_leave_plain_text_alone() -> None:
    with run_engine(answer_script({END: 'No call: {"name"} < >'}), max_seq_len=4096) as engine:
        for path in (CHAT, MESSAGES):
            reading = read_one(send(engine, path, tools=offer(path, TOOLS, strict=True)))
            assert (reading.text, reading.calls) == ('No call: {"name"} < >', ())
            assert reading.reason in ("stop", "end_turn")


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_strict_tool_that_cannot_be_enforced_is_refused(path: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with run_wild() as engine:
        answer = send(engine, path, tools=offer(path, {"f": schema}, strict=True))
        assert (answer.status, answer.json["error"]["param"]) == (400, "tools")
        assert "uniqueItems" in answer.json["error"]["message"]
        # Without the promise it is as good as can be.
        loose = {"tools": offer(path, {"f": schema}), "tool_choice": choose(path, "required")}
        reading = read_one(send(engine, path, max_tokens=900, temperature=1, top_k=0, **loose))
    assert reading.calls
    assert all(isinstance(arguments, dict) for _, arguments in reading.calls)


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_tools_and_a_format_together_give_a_call_or_an_answer_in_that_form(
    path: str, tool_format: Any
) -> None:
    call, text = '{"name": "g", "arguments": {"x": 1, "unit": "m"}}', '{"x": 5, "unit": "km"}'
    if tool_format == "hermes":
        call = f"<tool_call>\n{call}\n</tool_call>"
    else:
        call = call.replace("arguments", "parameters")
    script = answer_script({f"<user>call{END}": call, f"<user>say{END}": text})
    fields = {"tools": offer(path, TOOLS), **shape(path, PLACE)}
    bodies = [
        fields | {"content": key, "stream": stream} for key in ("call", "say") for stream in (False, True)
    ]
    with run_engine(script, max_seq_len=4096) as engine:
        answers = send_together(engine, path, *bodies, tool_format=tool_format)
    called, called_again, said, said_again = map(read_one, answers)
    assert (called.text, called.calls) == ("", (("g", {"x": 1, "unit": "m"}),))
    assert (said.text, said.calls) == (text, ())
    assert (called_again, said_again) == (called, said)
