"""The OpenAPI document says what the server does."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import attrs
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from astrai_server.anthropic import ContentBlock, Message, MessagesRequest, PromptRequest
from astrai_server.app import create_app
from astrai_server.debug import PrefixRequest
from astrai_server.gate import EngineGate
from astrai_server.keys import load_keys
from astrai_server.openai import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    StreamOptions,
    ToolCall,
)
from astrai_server.openapi import describe_api
from astrai_server.run import listen
from astrai_server.schema import SchemaBuilder
from astrai_server.wire import InvalidRequestError, read_request
from chaos.generate import RequestGenerator
from fake_engine import Answer, Client, FakeEngine, ask, build_settings, chat_body

REQUESTS = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": PromptRequest,
}
CONDITIONAL = frozenset(
    {
        *("content", "tool_calls", "text", "refusal", "json_schema", "top_logprobs", "best_of", "prompt"),
        *("tools", "tool_choice", "input", "id", "name", "tool_use_id", "output_format"),
    }
)
"""Fields that are read or not depending on others."""
KINDS = sorted(REQUESTS.values(), key=lambda kind: kind.__name__)
DOCUMENT = json.loads(json.dumps(describe_api(has_debug=True)))
SCHEMAS = DOCUMENT["components"]["schemas"]


def read(kind: type, **fields: Any) -> Any:
    least = {"prompt": "hi"} if kind is CompletionRequest else chat_body()
    return read_request(json.dumps(least | fields).encode(), kind)[0]


def list_fields(key: str) -> Iterator[tuple[type, str, Any]]:
    """Top-level fields whose schema has ``key``, with its value."""
    for kind in KINDS:
        for name, schema in SCHEMAS[kind.__name__]["properties"].items():
            if key in schema:
                yield kind, name, schema[key]


def list_operations(document: Any) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}


@pytest.mark.parametrize("debug", [False, True])
def test_every_route_of_the_application_is_described_and_no_other(debug: bool) -> None:
    app = create_app(build_settings(debug=debug), EngineGate())
    routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    assert list_operations(describe_api(has_debug=debug)) == {
        (method, path) for method, path in routes if method != "HEAD"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_request_is_described(kind: Any) -> None:
    schema = SCHEMAS[kind.__name__]
    names = {field.name for field in attrs.fields(kind)} | kind.WITHOUT_EFFECT
    assert schema["properties"].keys() == names
    assert schema["required"] == (["prompt"] if kind is CompletionRequest else ["messages"])


@pytest.mark.parametrize(
    "kind", [ChatMessage, ContentPart, ToolCall, StreamOptions, Message, ContentBlock, PrefixRequest]
)
def test_classes_inside_of_requests_are_described_under_their_names(kind: Any) -> None:
    names = {field.name for field in attrs.fields(kind)} | getattr(kind, "WITHOUT_EFFECT", frozenset())
    assert SCHEMAS[kind.__name__]["properties"].keys() == names


@pytest.mark.parametrize("document", [DOCUMENT, describe_api(validation_status=400)])
def test_the_document_is_valid_openapi(document: Any) -> None:
    validate(document)


def test_a_server_that_answers_400_to_wrong_fields_promises_no_422() -> None:
    usual, other = (describe_api(validation_status=status) for status in (422, 400))
    for path in REQUESTS:
        assert "422" in usual["paths"][path]["post"]["responses"]
        assert "422" not in other["paths"][path]["post"]["responses"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("temperature", {"type": ["number", "null"], "minimum": 0, "maximum": 2, "default": 1.0}),
        ("top_k", {"type": ["integer", "null"], "minimum": -1, "default": 50}),
        ("stream", {"type": ["boolean", "null"], "default": False}),
    ],
)
def test_types_ranges_and_defaults_are_those_of_the_class(name: str, expected: Any) -> None:
    for kind in (ChatCompletionRequest, CompletionRequest, MessagesRequest):
        assert SCHEMAS[kind.__name__]["properties"][name] == expected


def test_the_docstring_of_a_field_is_its_description() -> None:
    properties = SCHEMAS["ChatCompletionRequest"]["properties"]
    assert properties["max_completion_tokens"]["description"] == "Wins over `max_tokens`."
    assert properties["model"]["description"].endswith("null is the name of the served model.")


@pytest.mark.parametrize(("kind", "name", "low"), list(list_fields("minimum")))
def test_a_minimum_is_the_lowest_value_that_is_read(kind: type, name: str, low: Any) -> None:
    assert getattr(read(kind, **{name: low}), name) == low
    with pytest.raises(InvalidRequestError, match=name):
        read(kind, **{name: low - 1})


@pytest.mark.parametrize(("kind", "name", "high"), list(list_fields("maximum")))
def test_a_maximum_is_the_highest_value_that_is_read(kind: type, name: str, high: Any) -> None:
    others = {"top_logprobs": {"logprobs": True}, "best_of": {"n": high}}.get(name, {})
    assert getattr(read(kind, **others, **{name: high}), name) == high
    with pytest.raises(InvalidRequestError, match=name):
        read(kind, **{name: high + 1})


@pytest.mark.parametrize(("kind", "name", "values"), list(list_fields("enum")))
def test_listed_values_are_read_and_others_are_not(kind: type, name: str, values: list[Any]) -> None:
    for value in values:
        read(kind, **{name: value})
    with pytest.raises(InvalidRequestError, match=name):
        read(kind, **{name: ["no such value"]})


@pytest.mark.parametrize(("kind", "name", "default"), list(list_fields("default")))
def test_null_is_the_documented_default(kind: type, name: str, default: Any) -> None:
    value = getattr(read(kind, **{name: None}), name)
    assert (list(value) if isinstance(value, tuple) else value) == default


@pytest.mark.parametrize("path", sorted(REQUESTS))
def test_what_the_document_refuses_is_refused(path: str) -> None:
    generator = RequestGenerator(DOCUMENT)
    for i in range(400):
        body, place = generator.make_invalid(random.Random(i), path)
        with pytest.raises(InvalidRequestError):
            pytest.fail(f"{place}: {read_request(json.dumps(body).encode(), REQUESTS[path])}")


@pytest.mark.parametrize("path", sorted(REQUESTS))
def test_what_the_document_accepts_is_read_unless_fields_contradict_each_other(path: str) -> None:
    generator = RequestGenerator(DOCUMENT)
    num_refused = 0
    for i in range(400):
        body = generator.make_valid(random.Random(i), path)
        try:
            read_request(json.dumps(body).encode(), REQUESTS[path])
        except InvalidRequestError as error:
            num_refused += 1
            for issue in error.issues:
                assert CONDITIONAL.intersection(issue.path), issue
    assert num_refused < 300


def test_a_field_with_a_check_that_nothing_is_known_of_is_an_error() -> None:
    @attrs.frozen
    class Odd:
        field: int = attrs.field(default=1, validator=lambda *_: None)

    Odd.__annotations__["field"] = int
    with pytest.raises(TypeError, match=r"Odd\.field"):
        SchemaBuilder().body_of(Odd)


def check_schema(answer: Answer, method: str, path: str) -> None:
    """The answer's status is described, and its body is as described."""
    described = DOCUMENT["paths"][path][method]["responses"][str(answer.status)]
    if "$ref" in described:
        described = DOCUMENT["components"]["responses"][str(answer.status)]
    schema = described["content"]["application/json"]["schema"]
    Draft202012Validator(schema | {"components": DOCUMENT["components"]}).validate(answer.json)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("post", "/v1/chat/completions", chat_body(), 200),
        ("post", "/v1/messages", chat_body(), 200),
        ("post", "/v1/messages", chat_body(temperature=3), 422),
        ("post", "/v1/chat/completions", chat_body(functions=[{}]), 400),
        ("post", "/v1/completions", {"prompt": "hi"}, 200),
        ("post", "/v1/completions", {"prompt": []}, 422),
        ("post", "/v1/messages/count_tokens", chat_body(), 200),
        ("get", "/v1/models", None, 200),
        ("get", "/health", None, 200),
        ("get", "/stats", None, 200),
    ],
)
def test_answers_are_as_described(method: str, path: str, body: Any, status: int) -> None:
    async def use(client: Client) -> Answer:
        return await (client.post(path, body) if body else client.send(method, path))

    answer = ask(FakeEngine(), use)
    assert answer.status == status
    check_schema(answer, method, path)


@pytest.mark.parametrize("path", ["/health", "/stats", "/v1/models"])
def test_answers_of_a_server_that_loads_are_as_described(path: str) -> None:
    async def use(client: Client) -> Answer:
        return await client.send("GET", path)

    answer = ask(None, use)
    assert answer.status == 503
    check_schema(answer, "get", path)


def test_the_server_gives_out_its_own_document() -> None:
    async def use(client: Client) -> Answer:
        return await client.send("GET", "/openapi.json")

    settings = build_settings(validation_status=400, debug=True)
    expected = describe_api(validation_status=400, has_debug=True)
    assert ask(None, use, settings).json == json.loads(json.dumps(expected))


def test_the_document_asks_for_a_key_where_the_rest_does() -> None:
    key = "k" * 32

    async def run() -> list[int]:
        settings = build_settings()
        keys = load_keys(settings, {"ASTRAI_API_KEYS": key})
        statuses = []
        async with listen(settings, EngineGate(), keys) as urls, aiohttp.ClientSession() as session:
            for headers in ({}, {"x-api-key": key}):
                async with session.get(urls[0] + "/openapi.json", headers=headers) as response:
                    statuses.append(response.status)
        return statuses

    assert asyncio.run(run()) == [401, 200]
