"""Calls of tools over HTTP, in both protocols: the scripted model writes them, clients read them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

from astrai_triton.engine import InferenceEngine
from fake_engine import Answer, Client, FakeEngine, ask, build_settings, chat_body, serve
from fakes import ByteTokenizer, ScriptedModel, answer_script

NUM_CALLS = 200
END = "<assistant>"
KEYS = ("", '"', "}", "é", "name", "arguments")
NAMES = ("get_weather", "f", "a.b:c-d")
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def make_value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, with what has broken parsers of calls."""
    kinds = ["text", "number", "literal"] if depth > 3 else ["text", "number", "literal", "list", "object"]
    kind = rng.choice(kinds)
    if kind == "text":
        pieces = [
            "a",
            '"',
            "\\",
            "{",
            "}",
            "[",
            "</tool_call>",
            "<tool_call>",
            "\n",
            "é",
            "😀",
            "\u2028",
            "\x7f",
            ",",
        ]
        return "".join(rng.choice(pieces) for _ in range(rng.randrange(6)))
    if kind == "number":
        return rng.choice(
            [0, -1, 1.5, 1e300, -2.5e-7, 12345678901234567890, rng.random(), rng.randrange(10**6)]
        )
    if kind == "literal":
        return rng.choice([True, False, None])
    if kind == "list":
        return [make_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return make_object(rng, depth + 1)


def make_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    return {f"k{i}{rng.choice(KEYS)}": make_value(rng, depth) for i in range(rng.randrange(5))}


def write_call(rng: random.Random, name: str, arguments: Any) -> str:
    """A call as models write it, in one of many ways."""
    dump = rng.choice([json.dumps, lambda value: json.dumps(value, ensure_ascii=False), dump_wide])
    key = rng.choice(["arguments", "arguments", "parameters"])
    fields = [f'"name": {json.dumps(name)}', f'"{key}": {dump(arguments)}']
    if rng.random() < 0.2:
        fields.reverse()
    space = rng.choice(["", "\n", " "])
    return f"<tool_call>{space}{{{', '.join(fields)}}}{space}</tool_call>"


def dump_wide(value: Any) -> str:
    return json.dumps(value, indent=1, separators=(" , ", " : "))


def tools_of(path: str) -> list[dict[str, Any]]:
    if path == CHAT:
        return [{"type": "function", "function": {"name": name}} for name in NAMES]
    return [{"name": name, "input_schema": {"type": "object"}} for name in NAMES]


@attrs.frozen
class Reading:
    """What a client has read of an answer."""

    text: str
    calls: tuple[tuple[str, Any], ...]
    reason: str


def read_whole(answer: Answer) -> Reading:
    assert answer.status == 200, answer.body
    body = answer.json
    if "choices" in body:
        choice = body["choices"][0]
        calls = choice["message"].get("tool_calls", [])
        assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
        named = tuple((call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls)
        return Reading(choice["message"]["content"] or "", named, choice["finish_reason"])
    named = tuple((b["name"], b["input"]) for b in body["content"] if b["type"] == "tool_use")
    text = "".join(b["text"] for b in body["content"] if b["type"] == "text")
    return Reading(text, named, body["stop_reason"])


def read_stream(answer: Answer) -> Reading:
    assert answer.status == 200, answer.body
    assert answer.frames[-1] == "data: [DONE]"
    payloads = [json.loads(frame.splitlines()[-1].removeprefix("data: ")) for frame in answer.frames[:-1]]
    return read_chat_frames(payloads) if "choices" in payloads[0] else read_message_frames(payloads)


def read_chat_frames(payloads: list[dict[str, Any]]) -> Reading:
    text, names, ids, arguments, reasons = "", [], [], dict[int, str](), []
    for payload in payloads:
        for choice in payload["choices"]:
            text += choice["delta"].get("content") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    # Name and id come once, in the order of the indices, before any argument.
                    assert call["index"] == len(names)
                    assert call["type"] == "function"
                    names.append(call["function"]["name"])
                    ids.append(call["id"])
                    arguments[call["index"]] = ""
                arguments[call["index"]] += call["function"].get("arguments", "")
    assert len(set(ids)) == len(names)
    assert len(reasons) == 1
    calls = tuple((name, json.loads(arguments[i])) for i, name in enumerate(names))
    return Reading(text, calls, reasons[0])


def read_message_frames(payloads: list[dict[str, Any]]) -> Reading:
    blocks: list[dict[str, Any]] = []
    is_open, reason = False, ""
    for payload in payloads:
        kind = payload["type"]
        if kind == "content_block_start":
            assert not is_open
            assert payload["index"] == len(blocks)
            blocks.append(dict(payload["content_block"], json=""))
            is_open = True
        elif kind == "content_block_delta":
            assert is_open
            assert payload["index"] == len(blocks) - 1
            delta = payload["delta"]
            if delta["type"] == "text_delta":
                blocks[-1]["text"] += delta["text"]
            else:
                assert delta["type"] == "input_json_delta"
                blocks[-1]["json"] += delta["partial_json"]
        elif kind == "content_block_stop":
            assert is_open
            is_open = False
        elif kind == "message_delta":
            reason = payload["delta"]["stop_reason"]
    assert not is_open
    calls = tuple((b["name"], json.loads(b["json"])) for b in blocks if b["type"] == "tool_use")
    return Reading("".join(b["text"] for b in blocks if b["type"] == "text"), calls, reason)


@contextmanager
def run_engine(answers: dict[str, str]) -> Iterator[InferenceEngine]:
    """Answers by the last user message; every byte is a token of its own."""
    script = answer_script({f"<user>{key}{END}": text for key, text in answers.items()})
    sizes: dict[str, Any] = {
        "max_batch_size": 16,
        "max_seq_len": 4096,
        "page_size": 16,
        "n_tokens": 32 * 4096,
    }
    with InferenceEngine(ScriptedModel(script), ByteTokenizer(), max_step_tokens=2048, **sizes) as engine:
        yield engine
        assert engine.drain(20)
        engine.pool.check()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_every_call_is_read_as_it_was_written_whole_and_streamed(path: str) -> None:
    rng = random.Random(7)
    expected: dict[str, tuple[str, Any]] = {}
    answers: dict[str, str] = {}
    for i in range(NUM_CALLS):
        name, arguments = rng.choice(NAMES), make_object(rng)
        expected[f"q{i}."] = (name, arguments)
        answers[f"q{i}."] = write_call(rng, name, arguments)

    async def use(engine: InferenceEngine) -> None:
        gate = asyncio.Semaphore(12)
        async with serve(engine, build_settings()) as client:

            async def check(key: str) -> None:
                body = chat_body(key, tools=tools_of(path), temperature=0, max_tokens=2048)
                async with gate:
                    whole = read_whole(await client.post(path, body))
                    streamed = read_stream(await client.post(path, body | {"stream": True}))
                reason = "tool_calls" if path == CHAT else "tool_use"
                assert whole == streamed == Reading("", (expected[key],), reason), answers[key]

            await asyncio.gather(*(check(key) for key in expected))

    with run_engine(answers) as engine:
        asyncio.run(use(engine))


TEXTS = {
    "two": (
        'Let me see.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>\n',
        Reading("Let me see.", (("f", {"a": 1}), ("get_weather", {})), "calls"),
    ),
    "none": ("Nothing to do.", Reading("Nothing to do.", (), "end")),
    "lookalike": ("a <tool_cal and <tool_call> b", Reading("a <tool_cal and <tool_call> b", (), "end")),
    "unknown": (
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        Reading('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', (), "end"),
    ),
    "bare": ('{"name": "f", "parameters": {"b": "}"}}', Reading("", (("f", {"b": "}"}),), "calls")),
    "empty": ("", Reading("", (), "end")),
}
REASONS = {CHAT: {"calls": "tool_calls", "end": "stop"}, MESSAGES: {"calls": "tool_use", "end": "end_turn"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("key", TEXTS)
def test_text_and_calls_are_told_apart(key: str, path: str, stream: bool) -> None:
    text, expected = TEXTS[key]

    async def use(client: Client) -> Answer:
        return await client.post(path, chat_body(key, tools=tools_of(path), temperature=0, stream=stream))

    with run_engine({key: text}) as engine:
        answer = ask(engine, use)
    reading = read_stream(answer) if stream else read_whole(answer)
    assert reading == attrs.evolve(expected, reason=REASONS[path][expected.reason])


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_without_tools_a_call_is_text(path: str) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    async def use(client: Client) -> list[Reading]:
        choice = "none" if path == CHAT else {"type": "none"}
        fields: list[dict[str, Any]] = [{}, {"tools": tools_of(path), "tool_choice": choice}]
        answers = [await client.post(path, chat_body("k", temperature=0, **extra)) for extra in fields]
        return [read_whole(answer) for answer in answers]

    with run_engine({"k": text}) as engine:
        readings = ask(engine, use)
    assert readings == [Reading(text, (), REASONS[path]["end"])] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_one_call_is_all_that_comes_where_calls_may_not_be_parallel(path: str, stream: bool) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    serial: dict[str, Any] = {"parallel_tool_calls": False}
    if path == MESSAGES:
        serial = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}

    async def use(client: Client) -> Answer:
        body = chat_body("k", tools=tools_of(path), temperature=0, stream=stream, max_tokens=2000, **serial)
        return await client.post(path, body)

    with run_engine({"k": call * 30}) as engine:
        answer = ask(engine, use)
        reading = read_stream(answer) if stream else read_whole(answer)
        assert reading == Reading("", (("f", {"a": 1}),), REASONS[path]["calls"])
        # The task was stopped, not read to its end.
        assert engine.drain(10)
        assert engine.get_stats()["total_tokens"] < 10 * len(call)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_calls_that_break_off_are_valid_json_all_the_same(path: str) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "some text'

    async def use(client: Client) -> list[Answer]:
        body = chat_body("k", tools=tools_of(path), temperature=0, max_tokens=len(text))
        return [await client.post(path, body | {"stream": stream}) for stream in (False, True)]

    with run_engine({"k": text + "x" * 100}) as engine:
        whole, streamed = ask(engine, use)
    expected = Reading(
        "", (("f", {"a": [1, {"b": "some text"}]}),), "length" if path == CHAT else "max_tokens"
    )
    assert read_whole(whole) == read_stream(streamed) == expected


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_conversation_with_calls_is_rendered(path: str) -> None:
    engine = FakeEngine()
    arguments = {"city": "Köln"}
    if path == CHAT:
        function = {"name": "f", "arguments": json.dumps(arguments, ensure_ascii=False)}
        asked = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        told = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    else:
        block = {"type": "tool_use", "id": "1", "name": "f", "input": arguments}
        asked = {"role": "assistant", "content": [block]}
        told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "rain"}]}
    messages = [{"role": "user", "content": "u"}, asked, told]

    async def use(client: Client) -> Answer:
        return await client.post(path, {"messages": messages, "tools": tools_of(path)})

    assert ask(engine, use).status == 200
    prompt = engine.prompts[0]
    for part in ("get_weather", "<tool_call>", "Köln", "<tool_response>", "rain"):
        assert part in prompt
    assert prompt.index("get_weather") < prompt.index("Köln") < prompt.index("rain")
    assert prompt.endswith(END)
