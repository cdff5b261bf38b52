"""The OpenAI protocol: requests, prompts and the exact frames of its answers."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from astrai_server.openai import ChatCompletionRequest, OpenAIResponseBuilder
from astrai_server.sse import encode_json
from astrai_server.wire import InvalidRequestError, read_request
from astrai_triton.engine.params import SamplingParams
from astrai_triton.errors import ContextLengthError
from fake_engine import Answer, Client, FakeEngine, ask, build_settings, chat_body

NUMERIC = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "top_logprobs",
]


def read(**fields: Any) -> ChatCompletionRequest:
    return read_request(encode_json(chat_body(**fields)), ChatCompletionRequest)[0]


def prepare(engine: FakeEngine | None = None, **fields: Any) -> Any:
    return OpenAIResponseBuilder().prepare(read(**fields), engine or FakeEngine())


def params(**fields: Any) -> SamplingParams:
    return prepare(**fields).params


def refuse(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        prepare(**fields)
    return caught.value


def prompt(*messages: dict[str, Any]) -> str:
    return bytes(prepare(messages=list(messages)).prompts[0]).decode()


# Parameters


def test_defaults_are_those_of_the_documents() -> None:
    assert params() == SamplingParams(max_tokens=2048, temperature=1.0, top_p=1.0, top_k=50)


@pytest.mark.parametrize("field", NUMERIC)
def test_null_in_a_numeric_field_is_the_default(field: str) -> None:
    assert params(**{field: None}) == params()


def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": -3,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3, 4],
    }
    expected = SamplingParams(**fields, stop=("a", "b"), logit_bias={5: -100.0, 0: 2.5})  # type: ignore[arg-type]
    assert params(**fields, stop=["a", "b"], logit_bias={"5": -100, "0": 2.5}) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.01),
        ("temperature", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -1),
        ("max_tokens", -1),
        ("seed", 2**63),
        ("n", 0),
        ("n", 129),
        ("top_logprobs", 3),
        ("top_logprobs", 21),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
        ("response_format", {"type": "json_schema"}),
        ("presence_penalty", 2.1),
        ("repetition_penalty", 0),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a"] * 1000),
        ("stop", ["a" * 2000]),
        ("stop_token_ids", [260]),
        ("stop_token_ids", [-1]),
        ("model", "m" * 257),
        ("messages", []),
        ("stream", "yes"),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1_0": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"260": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": "2"}),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    issue = refuse(**{field: value}).issues[0]
    assert issue.path[0] == field
    assert not issue.is_unsupported


@pytest.mark.parametrize("value", [0, 1e-30, 1e-4, 2])
def test_extreme_temperatures_are_taken(value: float) -> None:
    assert params(temperature=value).temperature == value


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (-1, -1), (10**15, 260)])
def test_top_k_is_off_or_at_most_the_vocabulary(value: int, expected: int) -> None:
    assert params(top_k=value).top_k == expected


@pytest.mark.parametrize(
    ("value", "expected"), [("x", ("x",)), (["x", "y"], ("x", "y")), ([], ()), (None, ())]
)
def test_stop_is_text_a_list_or_nothing(value: Any, expected: tuple[str, ...]) -> None:
    assert params(stop=value).stop == expected


def test_max_completion_tokens_wins() -> None:
    assert params(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert params(max_tokens=5, max_completion_tokens=0).max_tokens == 0


def test_max_tokens_is_clamped_to_the_context() -> None:
    engine = FakeEngine(max_seq_len=100)
    context = prepare(engine, max_tokens=10**9, min_tokens=10**9)
    assert context.params.max_tokens == 100 - len(context.prompts[0]) == context.params.min_tokens


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(ContextLengthError, match="maximum context length is 32 tokens"):
        prepare(FakeEngine(max_seq_len=32), content="x" * 32)


@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("functions", [{}], []),
        ("function_call", {"name": "f"}, "auto"),
        ("modalities", ["text", "audio"], ["text"]),
        ("audio", {"voice": "x"}, None),
        ("prediction", {"type": "content"}, None),
        ("web_search_options", {}, None),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any, harmless: Any) -> None:
    issue = refuse(**{field: value}).issues[0]
    assert issue.path == (field,)
    assert issue.is_unsupported
    assert params(**{field: harmless}) == params()


@pytest.mark.parametrize("field", sorted(ChatCompletionRequest.WITHOUT_EFFECT))
def test_fields_without_effect_are_accepted_quietly(field: str) -> None:
    request, unknown = read_request(encode_json(chat_body(**{field: {"any": 1}})), ChatCompletionRequest)
    assert request == read()
    assert unknown == ()


# Messages


def test_content_is_a_string_or_joined_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt({"role": "user", "content": "ab"}) == "<user>ab<assistant>"
    assert prompt({"role": "user", "content": parts}) == "<user>ab<assistant>"


def test_every_role_reaches_the_template() -> None:
    messages = [
        {"role": role, "content": role[0]}
        for role in ("developer", "system", "user", "user", "assistant", "tool")
    ]
    expected = (
        "<system>d<system>s<user>u<user>u<assistant>a<user><tool_response>\nt\n</tool_response><assistant>"
    )
    assert prompt(*messages) == expected


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": []}, {"content": ""}])
def test_an_assistant_may_have_said_nothing(message: dict[str, Any]) -> None:
    said = {"role": "assistant"} | message
    assert prompt({"role": "user", "content": "u"}, said) == "<user>u<assistant><assistant>"


def test_tool_calls_of_the_history_are_rendered() -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": "broken"}},
    ]
    text = prompt(
        {"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": calls}
    )
    first = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    second = '<tool_call>\n{"name": "g", "arguments": "broken"}\n</tool_call>'
    assert text == f"<user>u<assistant>{first}\n{second}<assistant>"


@pytest.mark.parametrize(
    ("message", "where", "is_unsupported"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role", True),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type", True),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call", True),
        ({"role": "user", "content": None}, "messages[0].content", False),
        ({"role": "user", "content": 5}, "messages[0].content", False),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text", False),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]", False),
        ({"content": "x"}, "messages[0].role", False),
        ("x", "messages[0]", False),
    ],
)
def test_bad_messages_are_refused_with_their_path(message: Any, where: str, is_unsupported: bool) -> None:
    issue = refuse(messages=[message]).issues[0]
    assert (issue.where, issue.is_unsupported) == (where, is_unsupported)


def test_an_unknown_content_part_is_named() -> None:
    assert '"image_url"' in str(refuse(content=[{"type": "image_url", "image_url": {"url": "x"}}]))


# Answers


def stream(engine: FakeEngine | None = None, usage_frame: str = "compat", **fields: Any) -> Answer:
    async def use(client: Client) -> Answer:
        return await client.chat(stream=True, **fields)

    return ask(engine or FakeEngine(), use, build_settings(usage_frame=usage_frame))


def load(answer: Answer) -> list[dict[str, Any]]:
    """Payloads of all frames but the last, which must be the end marker; every frame is one data line."""
    *frames, last = answer.frames
    assert last == "data: [DONE]"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def test_a_whole_answer() -> None:
    async def use(client: Client) -> Answer:
        return await client.chat(model="mine")

    answer = ask(FakeEngine(["Hel", "", "lo"], cached_tokens=16), use)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    body = answer.json
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": "mine",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
        ],
        "usage": {
            "prompt_tokens": 19,
            "completion_tokens": 3,
            "total_tokens": 22,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }


def test_a_stream_frame_by_frame() -> None:
    answer = stream(FakeEngine([" Hé", "", "llo\n"], finish="length", cached_tokens=16))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = load(answer)
    shared = {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}
    assert len(shared) == 1
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": " Hé"}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "llo\n"}, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": "length"}],
        [{"index": 0, "delta": {}, "finish_reason": None}],
    ]
    assert {"prompt_tokens", "completion_tokens", "total_tokens", "usage"} <= set(chunks[-1])
    assert all("usage" not in chunk for chunk in chunks[:-1])


USAGE = {
    "prompt_tokens": 19,
    "completion_tokens": 2,
    "total_tokens": 21,
    "prompt_tokens_details": {"cached_tokens": 0},
}
COUNTS = {key: value for key, value in USAGE.items() if key != "prompt_tokens_details"}
EMPTY_CHOICE = [{"index": 0, "delta": {}, "finish_reason": None}]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}])
@pytest.mark.parametrize("usage_frame", ["compat", "openai", "seed"])
def test_the_setting_chooses_the_usage_frame(usage_frame: str, options: Any) -> None:
    last = load(stream(usage_frame=usage_frame, stream_options=options))[-1]
    if usage_frame == "seed":
        assert last == COUNTS
    elif usage_frame == "openai":
        assert last["choices"][0]["finish_reason"] == "stop"
        assert "usage" not in last
    else:
        assert last["choices"] == EMPTY_CHOICE
        assert last["usage"] == USAGE
        assert {key: last[key] for key in COUNTS} == COUNTS


@pytest.mark.parametrize("usage_frame", ["compat", "openai", "seed"])
def test_the_request_overrules_the_setting(usage_frame: str) -> None:
    wanted = load(stream(usage_frame=usage_frame, stream_options={"include_usage": True}))
    assert wanted[-1]["choices"] == []
    assert wanted[-1]["usage"] == USAGE
    assert not COUNTS.keys() & wanted[-1].keys()
    assert all(chunk["usage"] is None for chunk in wanted[:-1])
    refused = load(stream(usage_frame=usage_frame, stream_options={"include_usage": False}))
    assert refused[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in chunk for chunk in refused)


def test_a_failure_in_mid_stream_is_the_last_frame() -> None:
    answer = stream(FakeEngine(["a"], finish="error", error=RuntimeError("secret")))
    assert answer.status == 200
    assert "[DONE]" not in answer.frames[-1]
    error = json.loads(answer.frames[-1].removeprefix("data: "))
    assert error.keys() == {"error"}
    assert error["error"]["type"] == "api_error"
    assert b"secret" not in answer.body


def test_an_answer_of_no_tokens_is_an_answer() -> None:
    chunks = load(stream(FakeEngine([], finish="length"), max_tokens=0))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length", None]


@pytest.mark.parametrize("model", ["\x00text\x00", '"\x00text\x00"', "x\n\ndata: [DONE]"])
def test_a_model_name_cannot_break_the_frames(model: str) -> None:
    chunks = load(stream(model=model))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:3]] == ["Hel", "lo"]
    assert {chunk["model"] for chunk in chunks} == {model}


def test_the_request_class_names_its_fields_once() -> None:
    names = {field.name for field in attrs.fields(ChatCompletionRequest)}
    assert not names & ChatCompletionRequest.WITHOUT_EFFECT
