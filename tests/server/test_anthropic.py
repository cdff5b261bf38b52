"""The Anthropic protocol: requests, prompts and the exact frames of its answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from astrai_server.anthropic import AnthropicResponseBuilder, MessagesRequest
from astrai_server.sse import encode_json
from astrai_server.wire import InvalidRequestError, read_request
from astrai_triton.engine.params import SamplingParams
from fake_engine import Answer, Client, FakeEngine, ask, chat_body

USER = {"role": "user", "content": "u"}


def prepare(engine: FakeEngine | None = None, **fields: Any) -> Any:
    request = read_request(encode_json(chat_body(**fields)), MessagesRequest)[0]
    return AnthropicResponseBuilder().prepare(request, engine or FakeEngine())


def params(**fields: Any) -> SamplingParams:
    return prepare(**fields).params


def prompt(*messages: Any, **fields: Any) -> str:
    return bytes(prepare(messages=list(messages), **fields).prompts[0]).decode()


def refuse(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        prepare(**fields)
    return caught.value


# Parameters


def test_defaults_are_those_of_the_documents() -> None:
    assert params() == SamplingParams(max_tokens=1024, temperature=1.0, top_p=1.0, top_k=50)


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "top_p", "top_k", "stop_sequences"])
def test_null_is_the_default(field: str) -> None:
    assert params(**{field: None}) == params()


def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {"max_tokens": 9, "temperature": 0, "top_p": 0.5, "top_k": 3}
    assert params(**fields, stop_sequences=["x"]) == SamplingParams(**fields, stop=("x",))  # type: ignore[arg-type]


def test_a_huge_max_tokens_is_clamped_to_the_context() -> None:
    context = prepare(FakeEngine(max_seq_len=100), max_tokens=10**9)
    assert context.params.max_tokens == 100 - len(context.prompts[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.01),
        ("top_k", -2),
        ("max_tokens", -1),
        ("max_tokens", "9"),
        ("stop_sequences", [""]),
        ("stop_sequences", "x"),
        ("messages", []),
        ("system", 5),
        ("stream", 1),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: Any) -> None:
    issue = refuse(**{field: value}).issues[0]
    assert issue.path[0] == field
    assert not issue.is_unsupported


@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("mcp_servers", [{"url": "x"}], []),
        ("container", "c", None),
        ("compaction", {"enabled": True}, None),
        ("thread", "t", None),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any, harmless: Any) -> None:
    issue = refuse(**{field: value}).issues[0]
    assert (issue.path, issue.is_unsupported) == ((field,), True)
    assert params(**{field: harmless}) == params()


@pytest.mark.parametrize("field", sorted(MessagesRequest.WITHOUT_EFFECT))
def test_fields_without_effect_are_accepted_quietly(field: str) -> None:
    _, unknown = read_request(encode_json(chat_body(**{field: {"any": 1}})), MessagesRequest)
    assert unknown == ()


# Messages


def test_system_is_text_or_blocks() -> None:
    blocks = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    assert prompt(USER, system="a\nb") == prompt(USER, system=blocks) == "<system>a\nb<user>u<assistant>"


@pytest.mark.parametrize("system", [None, "", [], " \n"])
def test_an_empty_system_is_none(system: Any) -> None:
    assert prompt(USER, system=system) == "<user>u<assistant>"


def test_system_messages_stay_where_they_are() -> None:
    assert prompt(USER, {"role": "system", "content": "s"}) == "<user>u<system>s<assistant>"


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cc_version=1; cch=a1b2;\nrules",
        "X-Anthropic-Billing-Header: 7\nrules",
        "rules\nx-anthropic-billing-header: 7",
        [{"type": "text", "text": "x-anthropic-billing-header: 7"}, {"type": "text", "text": "rules"}],
    ],
)
def test_the_billing_line_is_taken_out_of_the_system_prompt(system: Any) -> None:
    assert prompt(USER, system=system).replace("\n", "") == "<system>rules<user>u<assistant>"


def test_two_billing_lines_give_one_prompt() -> None:
    texts = {prompt(USER, system=f"x-anthropic-billing-header: {i}\nrules") for i in range(3)}
    assert len(texts) == 1


def test_other_lines_that_mention_the_header_stay() -> None:
    system = "say x-anthropic-billing-header: 7"
    assert system in prompt(USER, system=system)


def test_content_blocks_are_joined_and_thoughts_dropped() -> None:
    blocks = [
        {"type": "thinking", "thinking": "secret", "signature": "s"},
        {"type": "text", "text": "a"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "b"},
    ]
    assert prompt(USER, {"role": "assistant", "content": blocks}, USER) == (
        "<user>u<assistant>a\nb<user>u<assistant>"
    )


def test_a_last_message_of_the_assistant_is_continued() -> None:
    assert prompt(USER, {"role": "assistant", "content": "I am"}) == "<user>u<assistant>I am"


@pytest.mark.parametrize("content", ["", [], [{"type": "thinking", "thinking": "hm"}]])
def test_an_empty_last_message_of_the_assistant_opens_a_new_turn(content: Any) -> None:
    assert prompt(USER, {"role": "assistant", "content": content}) == "<user>u<assistant>"


@pytest.mark.parametrize(
    ("message", "where", "is_unsupported"),
    [
        ({"role": "developer", "content": "x"}, "messages[0].role", True),
        ({"role": "user", "content": [{"type": "image"}]}, "messages[0].content[0].type", True),
        ({"role": "assistant", "content": [{"type": "tool_use"}]}, "messages[0].content[0].id", False),
        ({"role": "user", "content": [{"type": "tool_result"}]}, "messages[0].content[0].tool_use_id", False),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text", False),
        ({"role": "user", "content": None}, "messages[0].content", False),
        ({"role": "user"}, "messages[0].content", False),
    ],
)
def test_bad_messages_are_refused_with_their_path(message: Any, where: str, is_unsupported: bool) -> None:
    issue = refuse(messages=[message]).issues[0]
    assert (issue.where, issue.is_unsupported) == (where, is_unsupported)


# Answers


def send(engine: FakeEngine, **fields: Any) -> Answer:
    async def use(client: Client) -> Answer:
        return await client.message(**fields)

    return ask(engine, use)


def load(answer: Answer) -> list[dict[str, Any]]:
    """Payloads of the named frames; each name is its payload's type."""
    events = []
    for frame in answer.frames:
        if frame.startswith("event: "):
            name, payload = frame.split("\n")
            events.append(json.loads(payload.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def usage(output_tokens: int, cached: int = 0) -> dict[str, int]:
    return {
        "input_tokens": 19 - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output_tokens,
    }


def test_a_whole_answer() -> None:
    body = send(FakeEngine(cached_tokens=16), model="mine").json
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "mine",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": usage(2, cached=16),
    }


def test_a_stream_event_by_event() -> None:
    answer = send(FakeEngine([" Hé", "", "llo"], cached_tokens=16), stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.frames[-1] == "data: [DONE]"
    start, *events = load(answer)
    message = start.pop("message")
    assert start == {"type": "message_start"}
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "astrai",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(0, cached=16),
    }
    delta = {"type": "content_block_delta", "index": 0}
    assert events == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        delta | {"delta": {"type": "text_delta", "text": " Hé"}},
        delta | {"delta": {"type": "text_delta", "text": "llo"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": usage(3, cached=16),
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize(
    ("finish", "stop_string", "reason"),
    [("stop", None, "end_turn"), ("length", None, "max_tokens"), ("stop", "END", "stop_sequence")],
)
def test_the_stop_reason_is_true(finish: str, stop_string: str | None, reason: str) -> None:
    engine = FakeEngine(finish=finish, stop_string=stop_string)
    body = send(engine).json
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop_string)
    delta = load(send(engine, stream=True))[-2]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": stop_string}


def test_a_failure_in_mid_stream_is_an_error_event() -> None:
    answer = send(FakeEngine(["a"], finish="error", error=RuntimeError("secret")), stream=True)
    name, payload = answer.frames[-1].split("\n")
    assert name == "event: error"
    body = json.loads(payload.removeprefix("data: "))
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")
    assert b"secret" not in answer.body
    assert b"[DONE]" not in answer.body


def test_a_failure_before_the_first_byte_has_a_status() -> None:
    error = RuntimeError("secret")
    answer = send(FakeEngine(finish="error", error=error, starts=False), stream=True)
    assert answer.status == 500
    assert answer.json["error"]["type"] == "api_error"
    assert b"secret" not in answer.body
