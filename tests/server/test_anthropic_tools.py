"""Tools in the Anthropic protocol, and its counting of tokens."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from answers import (
    END,
    MESSAGES,
    connect_anthropic,
    join_blocks,
    load_frames,
    make_body,
    read_one,
    run_engine,
    usage_of,
)
from astrai_server.anthropic import AnthropicResponseBuilder, MessagesRequest
from astrai_server.sse import encode_json
from astrai_server.wire import InvalidRequestError, read_request
from fake_engine import Answer, Client, FakeEngine, ask, chat_body
from fakes import answer_script

USER = {"role": "user", "content": "u"}
TOOLS: list[dict[str, Any]] = [
    {
        "name": "f",
        "description": "Does it.",
        "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    }
]
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "é"}}
ASKED = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, CALL]}


def prepare(**fields: Any) -> Any:
    request = read_request(encode_json(chat_body(**fields)), MessagesRequest)[0]
    return AnthropicResponseBuilder().prepare(request, FakeEngine())  # type: ignore[arg-type]


def prompt(*messages: Any) -> str:
    return bytes(prepare(messages=list(messages)).prompts[0]).decode()


def refuse(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        prepare(**fields)
    return caught.value


def result(content: Any, **fields: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content} | fields
    return {"role": "user", "content": [block]}


@pytest.mark.parametrize(
    ("content", "fields", "text"),
    [
        ("rain", {}, "rain"),
        ([{"type": "text", "text": "rain"}, {"type": "text", "text": "wind"}], {}, "rain\nwind"),
        ([], {}, ""),
        (None, {}, ""),
        ("no such town", {"is_error": True, "cache_control": {"type": "ephemeral"}}, "Error: no such town"),
    ],
)
def test_a_result_of_a_tool_is_rendered(content: Any, fields: dict[str, Any], text: str) -> None:
    rendered = prompt(USER, ASKED, result(content, **fields))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    response = f"<tool_response>\n{text}\n</tool_response>"
    assert rendered == f"<user>u<assistant>{call}<user>{response}<assistant>"


def test_what_a_user_says_beside_a_result_stays_in_its_place() -> None:
    blocks = [
        {"type": "text", "text": "before"},
        *result("rain")["content"],
        {"type": "text", "text": "after"},
    ]
    rendered = prompt(USER, ASKED, {"role": "user", "content": blocks})
    assert rendered.index("before") < rendered.index("rain") < rendered.index("after")


@pytest.mark.parametrize(
    ("messages", "where", "is_unsupported"),
    [
        ([USER, ASKED], "messages[1]", False),
        ([USER, ASKED, {"role": "assistant", "content": [CALL]}], "messages[2]", False),
        ([{"role": "user", "content": [CALL]}], "messages[0].content[0].type", False),
        ([USER, result("x") | {"role": "assistant"}], "messages[1].content[0].type", False),
        (
            [USER, ASKED, result([{"type": "image", "source": {}}])],
            "messages[2].content[0].content[0].type",
            True,
        ),
        (
            [USER, {"role": "assistant", "content": [CALL | {"input": "x"}]}],
            "messages[1].content[0].input",
            False,
        ),
    ],
)
def test_bad_calls_and_results_are_refused_with_their_path(
    messages: Any, where: str, is_unsupported: bool
) -> None:
    issue = refuse(messages=messages).issues[0]
    assert (issue.where, issue.is_unsupported) == (where, is_unsupported)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": TOOLS * 2}, "tools[1].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ],
)
def test_bad_tools_are_refused_with_their_path(fields: dict[str, Any], where: str) -> None:
    assert refuse(**fields).issues[0].where == where


def ask_twice(text: str, **fields: Any) -> tuple[Answer, Answer]:
    """The answer ``text``, whole and streamed, to a request with tools."""
    body = make_body(tools=TOOLS, max_tokens=500, **fields)

    async def use(client: Client) -> tuple[Answer, Answer]:
        return await client.post(MESSAGES, body), await client.post(MESSAGES, body | {"stream": True})

    with run_engine(answer_script({END: text}), max_seq_len=4096) as engine:
        return ask(engine, use)


def write_call(arguments: str) -> str:
    return f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'


def test_texts_and_calls_are_blocks_in_their_order() -> None:
    calls = [write_call(f'{{"a": "{text}"}}') for text in ("é", "2", "3")]
    whole, streamed = ask_twice(f"Let me see. {calls[0]}\n{calls[1]} And: {calls[2]} Done.")
    blocks = whole.json["content"]
    assert [block.get("text") or block["input"] for block in blocks] == [
        "Let me see.",
        {"a": "é"},
        {"a": "2"},
        "And:",
        {"a": "3"},
        "Done.",
    ]
    ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
    assert len(set(ids)) == 3
    assert all(value.startswith("toolu_") for value in ids)
    assert whole.json["stop_reason"] == "tool_use"
    joined, delta = join_blocks(load_frames(streamed))
    assert delta == {"stop_reason": "tool_use", "stop_sequence": None}
    assert [block.get("text") or json.loads(block["json"]) for block in joined] == [
        block.get("text") or block["input"] for block in blocks
    ]


def test_a_text_that_only_tools_could_follow_is_one_block() -> None:
    whole, streamed = ask_twice("")
    assert whole.json["content"] == [{"type": "text", "text": ""}]
    assert join_blocks(load_frames(streamed))[0] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1e999}',
        '{"a": -1E+400, "b": 123456789012345678901234567890.5}',
        '{"a": ' + "9" * 300 + "}",
        '{"a": "\\ud800", "é": "😀\\u0000"}',
        '{"a": {"content":[]}, "content":[]}',
        "{}",
    ],
)
def test_the_input_of_a_tool_is_what_the_model_wrote(arguments: str) -> None:
    whole, streamed = ask_twice(write_call(arguments), model='"content":[]')
    text = whole.body.decode("ascii")
    assert json.loads(text)["content"][0]["input"] == json.loads(arguments)
    (block,) = join_blocks(load_frames(streamed))[0]
    assert block["json"] == arguments
    assert whole.json["model"] == '"content":[]'


def test_a_stop_sequence_in_the_text_after_a_call_is_the_end_of_a_turn_with_tools() -> None:
    whole, streamed = ask_twice(write_call("{}") + " and STOP here", stop_sequences=["STOP"])
    reading = read_one(whole)
    assert (reading.text, reading.calls, reading.reason, reading.stop) == (
        "and ",
        (("f", {}),),
        "tool_use",
        None,
    )
    assert read_one(streamed) == reading


def test_a_stop_sequence_in_a_call_is_no_call_to_be_run() -> None:
    whole, streamed = ask_twice(write_call('{"a": "all but STOP this"}'), stop_sequences=["STOP"])
    reading = read_one(whole)
    assert (reading.calls, reading.reason, reading.stop) == (
        (("f", {"a": "all but "}),),
        "stop_sequence",
        "STOP",
    )
    assert read_one(streamed) == reading


def test_a_stop_sequence_behind_the_arguments_of_a_call_leaves_it_whole() -> None:
    whole, streamed = ask_twice(write_call('{"a": "x"}'), stop_sequences=["</tool_call>"])
    reading = read_one(whole)
    assert (reading.calls, reading.reason, reading.stop) == ((("f", {"a": "x"}),), "tool_use", None)
    assert read_one(streamed) == reading


# Counting tokens

PROMPTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "long": {"messages": [{"role": "user", "content": "x" * 200}]},
    "system": {"system": [{"type": "text", "text": "s" * 50, "cache_control": {"type": "ephemeral"}}]},
    "billing": {"system": "x-anthropic-billing-header: 7\nrules"},
    "tools": {"tools": TOOLS},
    "forced": {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}},
    "no tools": {"tools": TOOLS, "tool_choice": {"type": "none"}},
    "result": {"tools": TOOLS, "messages": [USER, ASKED, result("rain")]},
    "thoughts": {"messages": [USER, {"role": "assistant", "content": ASKED["content"][:1]}, USER]},
    "continued": {"messages": [USER, {"role": "assistant", "content": "I am"}]},
    "form": {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
}


@pytest.mark.parametrize("name", PROMPTS)
def test_tokens_are_counted_as_a_request_counts_them(name: str) -> None:
    body = make_body(max_tokens=1, **PROMPTS[name])

    async def use(client: Client) -> list[Answer]:
        # What a count has no use for is ignored; a second request finds its prompt cached.
        paths = [f"{MESSAGES}/count_tokens", MESSAGES, MESSAGES]
        return [await client.post(path, body) for path in paths]

    with run_engine(max_seq_len=2048) as engine:
        counted, first, second = ask(engine, use)
    assert counted.status == 200
    total = counted.json["input_tokens"]
    assert counted.json == {"input_tokens": total}
    for answer in (first, second):
        usage = usage_of(answer)
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == total
    assert usage_of(second)["cache_read_input_tokens"] == (total - 1) // 4 * 4


def test_a_prompt_longer_than_the_context_is_counted_too() -> None:
    async def use(client: Client) -> list[Answer]:
        body = chat_body("x" * 100)
        return [await client.post(path, body) for path in (f"{MESSAGES}/count_tokens", MESSAGES)]

    with run_engine(max_seq_len=64) as engine:
        counted, refused = ask(engine, use)
    assert counted.json == {"input_tokens": 100 + len(f"<user>{END}")}
    assert refused.status == 400


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [USER, ASKED]}, "messages[1]"),
        ({"messages": [USER], "tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"messages": [USER], "mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_what_cannot_be_counted_is_refused_with_its_path(body: Any, where: str) -> None:
    async def use(client: Client) -> Answer:
        return await client.post(f"{MESSAGES}/count_tokens", body)

    answer = ask(FakeEngine(), use)
    assert answer.status in (400, 422)
    assert answer.json["error"]["param"] == where


# The official client


def test_the_official_client_streams_calls_and_counts_tokens() -> None:
    text = "Let me see. " + write_call('{"a": "é😀"}') + " Done."
    with run_engine(answer_script({END: text})) as engine, connect_anthropic(engine) as client:
        body: Any = {"model": "m", "messages": [USER], "tools": TOOLS}
        counted = client.messages.count_tokens(**body)
        with client.messages.stream(max_tokens=200, extra_body={"temperature": 0}, **body) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_message()
    assert {"text", "input_json", "content_block_stop", "message_stop"} <= kinds
    first, call, last = final.content
    assert (first.type, call.type, last.type) == ("text", "tool_use", "text")
    assert (call.type == "tool_use" and call.name, call.input) == ("f", {"a": "é😀"})  # type: ignore[union-attr]
    assert final.stop_reason == "tool_use"
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == counted.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_of_the_official_client_runs_tools(stream: bool) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def f(a: str) -> str:
        """Do it."""
        asked.append(a)
        return "rain"

    script = answer_script({"\nrain\n</tool_response>" + END: "It rains.", END: write_call('{"a": "é"}')})
    with run_engine(script) as engine, connect_anthropic(engine) as client:
        runner: Any = client.beta.messages.tool_runner(
            model="m",
            max_tokens=100,
            messages=[{"role": "user", "content": "u"}],
            tools=[f],
            stream=stream,
            extra_body={"temperature": 0},
        )
        final = runner.until_done()
    assert asked == ["é"]
    assert [block.text for block in final.content] == ["It rains."]
