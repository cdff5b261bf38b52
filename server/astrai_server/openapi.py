"""The OpenAPI 3.1 document of the HTTP API, made of the very classes that read the requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType

from aiohttp import web

from astrai_server import page
from astrai_server.anthropic import MessagesRequest, PromptRequest
from astrai_server.config import ApiSettings
from astrai_server.debug import PrefixRequest
from astrai_server.openai import ChatCompletionRequest, CompletionRequest
from astrai_server.schema import Json, SchemaBuilder, refer
from astrai_server.sse import encode_json
from astrai_server.tokenization import DetokenizeRequest, TokenizeRequest
from astrai_server.wire import MAX_DEPTH, MAX_INTEGER_DIGITS
from astrai_triton import __version__

PATH = "/openapi.json"

_ABOUT = f"""\
Two protocols over one engine. Beyond what schemas can say: bodies are UTF-8 JSON without NaN and Infinity, at
most {MAX_DEPTH} levels deep, no key twice in an object; an integer has no fraction and at most
{MAX_INTEGER_DIGITS} digits; `null` in a field that is not required is its default; unknown fields are
ignored. Tokens wanted beyond what context and KV pool leave are cut to that; a prompt that does not fit is
refused."""

_ERRORS: Mapping[int, str] = MappingProxyType(
    {
        400: "Not JSON, not supported, or longer than the context.",
        401: "No valid API key.",
        404: "Nothing here of that name.",
        408: "The body did not arrive in time.",
        413: "The body is larger than `limits.max_body_bytes`.",
        422: "A field has the wrong type or value, or is missing.",
        429: "The queue is full, or this API key has too many requests at a time.",
        500: "A fault of the server; its log has it under the request id.",
        503: "Loading, shutting down or dead.",
        504: "The answer took longer than `limits.request_timeout_s`.",
    }
)
_CAN_RETRY = frozenset({429, 503})
_RETRY_AFTER: Json = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
_INFERENCE_ERRORS = (400, 401, 408, 413, 422, 429, 500, 503, 504)


def make_handler(api: ApiSettings) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Make the handler of ``GET /openapi.json``. Like all but ``/health`` it stands behind API keys."""

    async def show(_: web.Request) -> web.Response:
        body = _encode_document(api.validation_status, api.debug)
        return web.Response(body=body, content_type="application/json")

    return show


def describe_api(*, validation_status: int = 422, has_debug: bool = False) -> Json:
    """Describe every route of the application.

    Args:
        validation_status: ``api.validation_status``.
        has_debug: ``api.debug``.

    Returns:
        The document, of values that JSON has.
    """
    schemas = SchemaBuilder()
    errors = [status for status in _INFERENCE_ERRORS if status != 422 or validation_status == 422]
    chat = {
        "tags": ["OpenAI"],
        "summary": "Answer a conversation, whole or as a stream.",
        "requestBody": schemas.body_of(ChatCompletionRequest),
        "responses": {"200": _answer_with("ChatCompletionResponse", is_stream=True), **_refer_to(errors)},
    }
    completion = {
        "tags": ["OpenAI"],
        "summary": "Complete texts, whole or as a stream.",
        "requestBody": schemas.body_of(CompletionRequest),
        "responses": {"200": _answer_with("CompletionResponse", is_stream=True), **_refer_to(errors)},
    }
    message = {
        "tags": ["Anthropic"],
        "summary": "Answer a conversation, whole or as a stream.",
        "requestBody": schemas.body_of(MessagesRequest),
        "responses": {"200": _answer_with("MessagesResponse", is_stream=True), **_refer_to(errors)},
    }
    model_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths: Json = {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": completion},
        "/v1/messages": {"post": message},
        "/v1/messages/count_tokens": {
            "post": {
                "tags": ["Anthropic"],
                "summary": "Tokens of a prompt.",
                "requestBody": schemas.body_of(PromptRequest),
                "responses": {"200": _answer_with("TokenCount"), **_refer_to(errors)},
            }
        },
        "/tokenize": {
            "post": {
                "summary": "A text or a conversation in tokens.",
                "requestBody": schemas.body_of(TokenizeRequest),
                "responses": {"200": _answer_with("TokenizeResponse"), **_refer_to(errors)},
            }
        },
        "/detokenize": {
            "post": {
                "summary": "Tokens as text.",
                "requestBody": schemas.body_of(DetokenizeRequest),
                "responses": {"200": _answer_with("DetokenizeResponse"), **_refer_to(errors)},
            }
        },
        "/v1/models": {"get": _describe_get("The served model, in a list.", "ModelList", 401, 503)},
        "/v1/models/{id}": {
            "get": _describe_get("The served model.", "Model", 401, 404, 503) | {"parameters": [model_id]}
        },
        "/health": {"get": _describe_health()},
        "/stats": {"get": _describe_get("Counters and gauges of the engine.", "Stats", 401, 503)},
        page.PATH: {"get": _describe_page()},
        "/metrics": {"get": _describe_metrics()},
        PATH: {"get": _describe_get("This document.", "Document", 401)},
    }
    if has_debug:
        paths["/debug/prefix"] = _describe_prefix(schemas, errors)
    return {
        "openapi": "3.1.0",
        "info": {"title": "astrai-triton", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "security": [{}, {"bearer": []}, {"header": []}],
        "components": {
            "schemas": {**schemas.components, **_ANSWERS},
            "responses": {str(status): _describe_error(status) for status in _ERRORS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


@cache
def _encode_document(validation_status: int, has_debug: bool) -> bytes:
    return encode_json(describe_api(validation_status=validation_status, has_debug=has_debug))


# Operations


def _describe_get(summary: str, answer: str, *errors: int) -> Json:
    return {"summary": summary, "responses": {"200": _answer_with(answer), **_refer_to(errors)}}


def _describe_health() -> Json:
    waiting = _answer_with("Health") | {
        "description": "Loading, draining or dead.",
        "headers": _RETRY_AFTER,
    }
    return {
        "summary": "Whether requests are taken. Asks for no API key.",
        "security": [{}],
        "responses": {"200": _answer_with("Health"), "503": waiting},
    }


def _describe_page() -> Json:
    answer = {"description": "The page.", "content": {"text/html": {"schema": _TEXT}}}
    return {"summary": "A page to chat. Asks for no API key.", "security": [{}], "responses": {"200": answer}}


def _describe_metrics() -> Json:
    kinds = ("text/plain", "application/openmetrics-text")
    answer = {"description": "The answer.", "content": {kind: {"schema": _TEXT} for kind in kinds}}
    return {
        "summary": "Everything to watch, for Prometheus.",
        "responses": {"200": answer, **_refer_to((401,))},
    }


def _describe_prefix(schemas: SchemaBuilder, errors: list[int]) -> Json:
    body = schemas.body_of(PrefixRequest)
    responses = {"200": _answer_with("PrefixReport"), **_refer_to(errors)}
    summary = "What the prefix cache would give a prompt."
    text: Json = {"type": "string"}
    query = [
        {"name": "prompt", "in": "query", "schema": text},
        {
            "name": "token_ids",
            "in": "query",
            "schema": text | {"description": "Numbers with commas between."},
        },
        {"name": "salt", "in": "query", "schema": text},
    ]
    return {
        "get": {"summary": summary, "parameters": query, "responses": responses},
        "post": {"summary": summary, "requestBody": body, "responses": responses},
    }


def _answer_with(schema: str, *, is_stream: bool = False) -> Json:
    content: Json = {"application/json": {"schema": refer("schemas", schema)}}
    description = "The answer."
    if is_stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
        description = "The answer; where `stream` is true, server-sent events, `data: [DONE]` being the last."
    return {"description": description, "content": content}


def _describe_error(status: int) -> Json:
    content = {"application/json": {"schema": refer("schemas", "Error")}}
    answer: Json = {"description": _ERRORS[status], "content": content}
    if status in _CAN_RETRY:
        answer["headers"] = _RETRY_AFTER
    return answer


def _refer_to(errors: Iterable[int]) -> Json:
    return {str(status): refer("responses", str(status)) for status in errors}


# Answers


def _object(**properties: Json) -> Json:
    """An object that has at least ``properties``."""
    return {"type": "object", "properties": properties, "required": list(properties)}


_TEXT: Json = {"type": "string"}
_NAME: Json = {"type": ["string", "null"]}
_COUNT: Json = {"type": "integer", "minimum": 0}
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT)

_ANSWERS: Mapping[str, Json] = MappingProxyType(
    {
        "ChatCompletionResponse": _object(
            id=_TEXT,
            object={"const": "chat.completion"},
            created=_COUNT,
            model=_TEXT,
            choices={
                "type": "array",
                "items": _object(
                    index=_COUNT,
                    message=_object(role={"const": "assistant"}, content=_NAME),
                    finish_reason=_TEXT,
                ),
            },
            usage=_object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT),
        ),
        "CompletionResponse": _object(
            id=_TEXT,
            object={"const": "text_completion"},
            created=_COUNT,
            model=_TEXT,
            choices={"type": "array", "items": _object(index=_COUNT, text=_TEXT, finish_reason=_TEXT)},
            usage=_object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT),
        ),
        "MessagesResponse": _object(
            id=_TEXT,
            type={"const": "message"},
            role={"const": "assistant"},
            model=_TEXT,
            content={"type": "array", "items": _object(type=_TEXT)},
            stop_reason=_TEXT,
            stop_sequence=_NAME,
            usage=_object(input_tokens=_COUNT, cache_read_input_tokens=_COUNT, output_tokens=_COUNT),
        ),
        "TokenizeResponse": _object(
            count=_COUNT,
            max_model_len=_COUNT,
            tokens={"type": "array", "items": _COUNT},
            token_strs={"type": ["array", "null"], "items": _TEXT},
        ),
        "DetokenizeResponse": _object(prompt=_TEXT),
        "TokenCount": _object(input_tokens=_COUNT),
        "Model": _MODEL,
        "ModelList": _object(object={"const": "list"}, data={"type": "array", "items": _MODEL}),
        "Health": _object(status=_TEXT, model_loaded={"type": "boolean"}),
        "Stats": _object(total_tasks=_COUNT, total_tokens=_COUNT, active_tasks=_COUNT, waiting_queue=_COUNT),
        "PrefixReport": {"type": "object"},
        "Document": {"type": "object"},
        "Error": _object(
            type={"const": "error"},
            error=_object(message=_TEXT, type=_TEXT, param=_NAME, code=_TEXT),
            detail={"description": "The message, or where and what each mistake of a body is."},
            request_id=_TEXT,
        ),
    }
)
