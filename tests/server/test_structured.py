"""Answers and calls that must be valid under a schema, from a model that would rather say anything else."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from answers import (
    CHAT,
    END,
    MESSAGES,
    connect_anthropic,
    connect_openai,
    is_valid,
    load_frames,
    read,
    read_one,
    run_engine,
    run_wild,
    send,
    send_together,
    shape,
)
from fakes import answer_script

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", '"']}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: dict[str, Any] = {
    "object": PERSON,
    "choice": {"enum": ["yes", "no", 1, None, {"a": [1]}]},
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "text": {"type": "string", "pattern": "^[a-c]{2,5}$"},
    "any": {},
    "any object": {"type": "object"},
}
# Where every token is as likely as any other, but for random preferences.
WILD = {"temperature": 1, "top_k": 0, "max_tokens": 400}
SEEDS = range(4)


# Answers under a schema


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_is_valid_or_breaks_off(name: str, path: str) -> None:
    schema = SCHEMAS[name]
    seeds: list[dict[str, Any]] = [{"content": f"{seed}"} for seed in SEEDS]
    bodies = [WILD | shape(path, schema) | seed | {"stream": i % 2 == 0} for i, seed in enumerate(seeds)]
    with run_wild() as engine:
        readings = [read_one(answer) for answer in send_together(engine, path, *bodies)]
    whole = [reading for reading in readings if reading.reason in ("stop", "end_turn")]
    assert whole
    for reading in whole:
        assert is_valid(json.loads(reading.text), schema), reading.text
    assert {reading.reason for reading in readings} <= {"stop", "end_turn", "length", "max_tokens"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_object_is_one(stream: bool) -> None:
    fields = WILD | {"response_format": {"type": "json_object"}, "n": 6, "seed": 1, "max_tokens": 800}
    with run_wild() as engine:
        readings = read(send(engine, CHAT, stream=stream, **fields))
    values = [json.loads(reading.text) for reading in readings if reading.reason == "stop"]
    assert values
    assert all(isinstance(value, dict) for value in values)


def test_what_breaks_off_is_the_beginning_of_what_would_have_come() -> None:
    body = WILD | shape(CHAT, PERSON) | {"seed": 4}
    with run_wild() as engine:
        whole, cut = send_together(engine, CHAT, body, body | {"max_tokens": 9})
    assert read_one(whole).reason == "stop"
    assert read_one(cut).reason == "length"
    assert read_one(whole).text.startswith(read_one(cut).text)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_stream_joined_is_the_whole_answer(path: str) -> None:
    body = {"temperature": 0, "max_tokens": 400} | shape(path, PERSON)
    with run_wild() as engine:
        whole, streamed = send_together(engine, path, body, body | {"stream": True})
    assert read_one(streamed) == read_one(whole)
    assert is_valid(json.loads(read_one(whole).text), PERSON)


def test_the_wish_of_the_model_counts_where_the_schema_leaves_it() -> None:
    text = '{"name": "Bo", "age": 7, "tags": ["é"], "next": null}'
    with run_engine(answer_script({END: text})) as engine:
        reading = read_one(send(engine, CHAT, **shape(CHAT, PERSON)))
    assert json.loads(reading.text) == json.loads(text)
    assert reading.reason == "stop"


@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}, {"min_tokens": 300}])
def test_an_answer_ends_where_nothing_more_may_come(fields: dict[str, Any]) -> None:
    with run_wild() as engine:
        reading = read_one(send(engine, CHAT, **(WILD | shape(CHAT, {"const": 12}) | fields)))
    assert (reading.text, reading.reason) == ("12", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_json_too(stream: bool) -> None:
    text = '{"name": "Bo", "age": 7, "tags": [], "next": null}'
    with run_engine(answer_script({END: text})) as engine:
        reading = read_one(send(engine, CHAT, stop='"age"', stream=stream, **shape(CHAT, PERSON)))
    assert (reading.text, reading.reason) == ('{"name": "Bo", ', "stop")


def test_penalties_and_bias_break_no_schema() -> None:
    bias = {str(token_id): -100 for token_id in b'"{}[],:'} | {str(ord("z")): 100}
    body = WILD | shape(CHAT, PERSON) | {"logit_bias": bias, "frequency_penalty": 2, "repetition_penalty": 3}
    with run_wild() as engine:
        readings = [
            read_one(answer) for answer in send_together(engine, CHAT, *(body | {"seed": i} for i in SEEDS))
        ]
    values = [json.loads(reading.text) for reading in readings if reading.reason == "stop"]
    assert values
    assert all(is_valid(value, PERSON) for value in values)


def test_entries_of_log_probabilities_cover_the_answer() -> None:
    fields = WILD | {"logprobs": True, "top_logprobs": 2, "seed": 4}
    with run_wild() as engine:
        reading = read_one(send(engine, CHAT, **fields, **shape(CHAT, PERSON)))
    assert b"".join(bytes(entry["bytes"]) for entry in reading.logprobs).decode() == reading.text


def test_choices_under_a_schema_are_all_valid() -> None:
    fields = WILD | {"n": 5, "seed": 3}
    with run_wild() as engine:
        readings = read(send(engine, CHAT, **fields, **shape(CHAT, SCHEMAS["list"])))
        alone = read_one(send(engine, CHAT, **(fields | {"n": 1, "seed": 5}), **shape(CHAT, SCHEMAS["list"])))
    assert all(is_valid(json.loads(reading.text), SCHEMAS["list"]) for reading in readings)
    assert readings[2] == alone
    assert len({reading.text for reading in readings}) > 1


@pytest.mark.parametrize("text", ["{}", "anything"])
def test_plain_text_is_as_free_as_without_a_format(text: str) -> None:
    with run_engine(answer_script({END: text})) as engine:
        assert read_one(send(engine, CHAT, response_format={"type": "text"})).text == text


def test_the_earlier_name_of_the_format_counts_beside_other_settings() -> None:
    fields = {"output_format": {"type": "json_schema", "schema": PERSON}, "output_config": {"effort": "low"}}
    with run_wild() as engine:
        reading = read_one(send(engine, MESSAGES, max_tokens=400, **fields))
    assert is_valid(json.loads(reading.text), PERSON)


# What cannot be enforced


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nope"},
        {"type": "object", "properties": 5},
        {"type": "string", "pattern": "("},
        {"type": "array", "uniqueItems": True},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/missing"},
        {"not": {}},
        {"type": "string", "format": "weird"},
        {"enum": []},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_path(schema: Any, stream: bool) -> None:
    requests = [
        (CHAT, shape(CHAT, schema), "response_format.json_schema.schema"),
        (MESSAGES, shape(MESSAGES, schema), "output_config.format.schema"),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": schema}}, "output_format.schema"),
    ]
    with run_wild() as engine:
        for path, fields, where in requests:
            answer = send(engine, path, stream=stream, **fields)
            assert answer.status == 400
            assert (answer.json["error"]["param"], answer.json["error"]["code"]) == (where, "unsupported")
        assert engine.get_stats()["total_tasks"] == 0


@pytest.mark.parametrize(
    ("fields", "where", "status"),
    [
        ({"type": "json_schema"}, "response_format.json_schema", 422),
        ({"type": "json_schema", "json_schema": {"schema": 5}}, "response_format.json_schema.schema", 422),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "response_format.json_schema", 422),
        ({"type": "xml"}, "response_format.type", 400),
        ({}, "response_format.type", 422),
        ("json_object", "response_format", 422),
    ],
)
def test_a_bad_format_is_refused_with_its_path(fields: Any, where: str, status: int) -> None:
    with run_wild() as engine:
        answer = send(engine, CHAT, response_format=fields)
    assert (answer.status, answer.json["error"]["param"]) == (status, where)


@pytest.mark.parametrize(
    ("fields", "where", "status"),
    [
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", 422),
        (
            {"output_config": {"format": {"type": "json_object", "schema": {}}}},
            "output_config.format.type",
            400,
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": []}}},
            "output_config.format.schema",
            422,
        ),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "output_format": {"type": "json_schema", "schema": {}},
            },
            "output_format",
            422,
        ),
    ],
)
def test_a_bad_output_format_is_refused_with_its_path(fields: Any, where: str, status: int) -> None:
    with run_wild() as engine:
        answer = send(engine, MESSAGES, **fields)
    assert (answer.status, answer.json["error"]["param"]) == (status, where)


def test_a_grammar_of_its_own_does_not_hold_back_the_stream() -> None:
    with run_engine(answer_script({END: '{"name": "Bo", "age": 7, "tags": [], "next": null}'})) as engine:
        frames = load_frames(send(engine, CHAT, stream=True, **shape(CHAT, PERSON)))
    texts = [frame["choices"][0]["delta"].get("content") for frame in frames]
    assert sum(bool(text) for text in texts) > 40


# The official clients


class Place(pydantic.BaseModel):
    x: int
    unit: Literal["m", "km"]


def test_the_official_openai_client_parses_answers_and_calls() -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with run_wild() as engine, connect_openai(engine) as client:
        said = client.chat.completions.parse(
            model="m", messages=messages, response_format=Place, temperature=0
        )
        called = client.chat.completions.parse(
            model="m",
            messages=messages,
            tools=[openai.pydantic_function_tool(Place)],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
        )
        with client.chat.completions.stream(
            model="m", messages=messages, response_format=Place, temperature=0
        ) as stream:
            streamed = stream.get_final_completion()
        with client.chat.completions.stream(
            model="m",
            messages=messages,
            tools=[openai.pydantic_function_tool(Place)],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
        ) as stream:
            kinds = {event.type for event in stream}
            streamed_call = stream.get_final_completion()
    assert isinstance(said.choices[0].message.parsed, Place)
    assert streamed.choices[0].message.parsed == said.choices[0].message.parsed
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Place)
    assert called.choices[0].finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.done" in kinds
    (same,) = streamed_call.choices[0].message.tool_calls or []
    assert same.function == call.function


def test_the_official_anthropic_client_parses_answers() -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with run_wild() as engine, connect_anthropic(engine) as client:
        message = client.messages.parse(model="m", max_tokens=200, messages=messages, output_format=Place)
        beta = client.beta.messages.parse(model="m", max_tokens=200, messages=messages, output_format=Place)
    assert isinstance(message.parsed_output, Place)
    assert isinstance(beta.parsed_output, Place)
