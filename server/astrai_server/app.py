"""The HTTP application: routes, one error body for all of them, one log line per request."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, get_args

import attrs
from aiohttp import HttpVersion11, web

from astrai_server import openapi, page
from astrai_server.anthropic import AnthropicResponseBuilder, PromptRequest, count_tokens
from astrai_server.builder import FinishName, ResponseBuilder
from astrai_server.config import LimitSettings, Settings
from astrai_server.connection import Connection
from astrai_server.debug import PrefixRequest, describe_prefix, read_query
from astrai_server.gate import EngineGate
from astrai_server.handler import ProtocolHandler
from astrai_server.keys import KeyRing
from astrai_server.metrics import Metrics
from astrai_server.openai import CompletionResponseBuilder, OpenAIResponseBuilder
from astrai_server.page import add_page
from astrai_server.problem import (
    UNAVAILABLE_RETRY_S,
    SlowBodyError,
    UnknownModelNameError,
    explain,
    is_internal,
    new_request_id,
)
from astrai_server.report import Report
from astrai_server.sse import encode_json
from astrai_server.stream import FrameStream
from astrai_server.tokenization import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from astrai_server.wire import read_request

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine

logger = logging.getLogger("astrai.server")

GATE = web.AppKey("GATE", EngineGate)
SETTINGS = web.AppKey("SETTINGS", Settings)
KEYS = web.AppKey("KEYS", KeyRing)
METRICS = web.AppKey("METRICS", Metrics)
CREATED = web.AppKey("CREATED", int)
"""When the application was made, in seconds since 1970: the ``created`` of its models."""

_REQUEST_ID = web.RequestKey("REQUEST_ID", str)
_REPORT = web.RequestKey("REPORT", Report)
_PROMPT_FIELD = web.RequestKey("PROMPT_FIELD", str)
_KEY_NAME = web.RequestKey("KEY_NAME", str)

INLINE_BYTES = 64 << 10
"""A larger body is read outside of the event loop."""

CLIENT_CLOSED = 499
"""Status in the log of a request whose client went away."""

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUIET_ROUTES = frozenset({"/health", "/stats", "/metrics"})
_OPEN_PATHS = frozenset({"/health", page.PATH})
"""What needs no API key: a load balancer has none, and the page is where people enter theirs."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(settings: Settings, gate: EngineGate, keys: KeyRing | None = None) -> web.Application:
    """Build the application. It answers from the start; the engine may come later.

    Run it with handler cancellation, or clients that go away keep their tasks (see ``run``).

    Args:
        settings: all settings; ``server`` is not looked at.
        gate: where the engine is, or will be.
        keys: who may use it; None is everybody.
    """
    app = web.Application(middlewares=[_trace], client_max_size=settings.limits.max_body_bytes)
    app[SETTINGS], app[GATE], app[CREATED] = settings, gate, int(time.time())
    app[KEYS] = KeyRing() if keys is None else keys
    app[METRICS] = Metrics(gate)
    app.on_response_prepare.append(_set_headers)
    api = settings.api
    builders: dict[str, ResponseBuilder[Any, Any]] = {
        "/v1/chat/completions": OpenAIResponseBuilder(api.usage_frame, api.tool_format),
        "/v1/completions": CompletionResponseBuilder(api.usage_frame),
        "/v1/messages": AnthropicResponseBuilder(api.tool_format),
    }
    for path, builder in builders.items():
        app.router.add_post(path, functools.partial(_answer, builder))
    for path, kind, compute in (
        ("/v1/messages/count_tokens", PromptRequest, count_tokens),
        ("/tokenize", TokenizeRequest, tokenize),
        ("/detokenize", DetokenizeRequest, detokenize),
    ):
        app.router.add_post(path, functools.partial(_compute, kind, compute))
    app.router.add_get("/v1/models", _list_models)
    app.router.add_get("/v1/models/{id:.+}", _show_model)
    app.router.add_get("/health", _show_health)
    app.router.add_get("/stats", _show_stats)
    app.router.add_get("/metrics", app[METRICS].handle)
    add_page(app)
    app.router.add_get(openapi.PATH, openapi.make_handler(settings.api))
    if settings.api.debug:
        app.router.add_get("/debug/prefix", _show_prefix)
        app.router.add_post("/debug/prefix", _show_prefix)
    return app


# Every request


@web.middleware
async def _trace(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, turn what it raises into the error body, and log one line."""
    given = request.headers.get("x-request-id", "")
    request_id = given if _SANE_ID.fullmatch(given) else new_request_id()
    request[_REQUEST_ID] = request_id
    started = time.perf_counter()
    status = CLIENT_CLOSED
    try:
        response = await _respond(request, handler, request_id)
        status = response.status
        return response
    finally:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "-"
        seconds = time.perf_counter() - started
        metrics, report = request.app[METRICS], request.get(_REPORT)
        metrics.count_response(route, status)
        if report is not None and report.prompt_tokens is not None:
            metrics.observe_end(seconds, report.prompt_tokens, report.num_tokens)
        level = logging.DEBUG if route in _QUIET_ROUTES else logging.INFO
        told = str(report or "") or f" took={seconds * 1e3:.1f}ms"
        if _KEY_NAME in request:
            told = f" key={request[_KEY_NAME]}{told}"
        logger.log(level, "%s %s %s %d%s", request_id, request.method[:16], route, status, told)


async def _respond(http: web.Request, handler: Handler, request_id: str) -> web.StreamResponse:
    is_preflight = http.method == "OPTIONS" and "Access-Control-Request-Method" in http.headers
    if is_preflight and _allowed_origin(http) is not None:
        return web.Response(status=204)
    try:
        if http.path not in _OPEN_PATHS:
            name = http.app[KEYS].authenticate(http.headers)
            if name is not None:
                http[_KEY_NAME] = name
        return await handler(http)
    except ConnectionError:
        # The client went away while it was being written to.
        raise
    except Exception as error:
        if is_internal(error):
            logger.exception("%s failed", request_id)
        problem = explain(error, http.app[SETTINGS].api.validation_status)
        if problem.param == "messages":
            problem = attrs.evolve(problem, param=http.get(_PROMPT_FIELD, problem.param))
        return problem.as_response(request_id)


def _allowed_origin(http: web.Request) -> str | None:
    """The origin of a browser's request, if it may call."""
    allowed = http.app[SETTINGS].api.cors_origins
    origin = http.headers.get("Origin")
    return origin if origin is not None and (origin in allowed or "*" in allowed) else None


async def _set_headers(http: web.Request, response: web.StreamResponse) -> None:
    # What was refused before any middleware ran has no id of its own, and brings its headers along.
    if _REQUEST_ID in http:
        response.headers["x-request-id"] = response.headers["request-id"] = http[_REQUEST_ID]
    if http.app[SETTINGS].api.cors_origins:
        response.headers.add("Vary", "Origin")
    origin = _allowed_origin(http)
    if origin is None:
        return
    response.headers["Access-Control-Allow-Origin"] = origin
    response.headers["Access-Control-Expose-Headers"] = "x-request-id, request-id, retry-after"
    if http.method == "OPTIONS":
        response.headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
        asked = http.headers.get("Access-Control-Request-Headers", "")
        response.headers["Access-Control-Allow-Headers"] = asked or "content-type"
        response.headers["Access-Control-Max-Age"] = "600"


# Answers


async def _answer(builder: ResponseBuilder[Any, Any], http: web.Request) -> web.StreamResponse:
    """A request of the protocol ``builder`` speaks."""
    limits, key = http.app[SETTINGS].limits, http.get(_KEY_NAME)
    http[_PROMPT_FIELD] = builder.prompt_field
    with http.app[GATE].enter(key) as engine:
        body = await _read_body(http, limits)
        request = await _parse(http[_REQUEST_ID], body, builder.request_type)
        handler = ProtocolHandler(
            request,
            engine,
            builder,
            request_id=http[_REQUEST_ID],
            timeout_s=limits.request_timeout_s,
            key=key,
            salt=_salt_of(http),
        )
        http[_REPORT] = handler.report
        if getattr(request, "stream", False):
            handler.report.meter = http.app[METRICS]
        try:
            answer = await handler.handle()
            if isinstance(answer, bytes):
                return web.Response(body=answer, content_type="application/json")
            return await _send_stream(http, answer, handler.report)
        finally:
            handler.close()


async def _compute(
    kind: type[Any], compute: Callable[[Any, InferenceEngine], Awaitable[Any]], http: web.Request
) -> web.Response:
    """A request of class ``kind`` that needs the engine but no task."""
    with http.app[GATE].enter(http.get(_KEY_NAME)) as engine:
        body = await _read_body(http, http.app[SETTINGS].limits)
        request = await _parse(http[_REQUEST_ID], body, kind)
        return _json_response(await compute(request, engine))


def _salt_of(http: web.Request) -> str | None:
    """What keeps the cached prefixes of this client apart from those of others."""
    return http.get(_KEY_NAME) if http.app[SETTINGS].cache.isolate else None


async def _read_body(http: web.Request, limits: LimitSettings) -> bytes:
    if http.content_length is not None and http.content_length > limits.max_body_bytes:
        raise web.HTTPRequestEntityTooLarge(limits.max_body_bytes, http.content_length)
    try:
        return await asyncio.wait_for(http.read(), limits.body_timeout_s)
    except TimeoutError:
        raise SlowBodyError(f"the body did not arrive within {limits.body_timeout_s:g} s") from None


async def _parse(request_id: str, body: bytes, kind: type[Any]) -> Any:
    if len(body) > INLINE_BYTES:
        request, unknown = await asyncio.to_thread(read_request, body, kind)
    else:
        request, unknown = read_request(body, kind)
    if unknown:
        names = ", ".join(ascii(name[:64]) for name in unknown[:16])
        logger.info("%s ignored %d unknown fields: %s", request_id, len(unknown), names)
    return request


async def _send_stream(http: web.Request, frames: FrameStream, report: Report) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            # Proxies of the nginx kind would collect frames.
            "X-Accel-Buffering": "no",
        }
    )
    if http.version >= HttpVersion11:
        response.enable_chunked_encoding()
    await response.prepare(http)
    connection, transport = http.protocol, http.transport
    await response.write(frames.start())
    if not isinstance(connection, Connection) or transport is None:
        raise ConnectionResetError("the client is gone")

    is_chunked, send = response.chunked, transport.write

    def write(data: bytes) -> bool:
        # Headers are out by now, and nothing else writes to this response until its end.
        send(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
        return connection.is_full

    timeout_s = http.app[SETTINGS].limits.write_timeout_s
    is_read = await frames.push(write, lambda: connection.wait_for_room(timeout_s))
    if not is_read:
        logger.warning("a client left its stream unread for %g s and is cut off", timeout_s)
        transport.abort()
        return response
    if report.finish not in get_args(FinishName):
        response.force_close()
    await response.write_eof()
    return response


# Everything else


async def _list_models(http: web.Request) -> web.Response:
    models = [_describe_model(http)]
    name = models[0]["id"]
    body = {"object": "list", "data": models, "has_more": False, "first_id": name, "last_id": name}
    return _json_response(body)


async def _show_model(http: web.Request) -> web.Response:
    model = _describe_model(http)
    if http.match_info["id"] != model["id"]:
        raise UnknownModelNameError(f"this server serves {model['id']!r} and no other model")
    return _json_response(model)


def _describe_model(http: web.Request) -> dict[str, Any]:
    """The served model, with the keys of both protocols."""
    name, created = http.app[GATE].engine.model_name, http.app[CREATED]
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "astrai",
        "type": "model",
        "display_name": name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
        "max_model_len": http.app[GATE].engine.max_seq_len,
    }


async def _show_health(http: web.Request) -> web.Response:
    state = http.app[GATE].state
    if state == "ready":
        return _json_response({"status": "ok", "model_loaded": True})
    response = _json_response({"status": state, "model_loaded": state == "draining"}, status=503)
    response.headers["Retry-After"] = str(math.ceil(UNAVAILABLE_RETRY_S))
    return response


async def _show_stats(http: web.Request) -> web.Response:
    return _json_response(http.app[GATE].engine.get_stats())


async def _show_prefix(http: web.Request) -> web.Response:
    with http.app[GATE].enter(http.get(_KEY_NAME)) as engine:
        if http.method == "POST":
            body = await _read_body(http, http.app[SETTINGS].limits)
            request = await _parse(http[_REQUEST_ID], body, PrefixRequest)
        else:
            request = read_query(http.query)
        return _json_response(await describe_prefix(request, engine, _salt_of(http)))


def _json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=encode_json(body), status=status, content_type="application/json")
