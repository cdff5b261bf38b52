"""A server that streams a scripted answer in any protocol, and fails as a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import attrs
from aiohttp import web

from app_thread import serve_app


@attrs.define(kw_only=True)
class Script:
    """What the server does, and what it was asked."""

    num_chunks: int | None = None
    """Of every answer; None: as many as ``max_tokens``."""
    gap_s: float = 0.0
    template_tokens: int = 0
    """Prompt tokens besides the words."""
    cached_tokens: int = 0
    """Of every prompt, said to come from a cache."""
    has_usage: bool = True
    statuses: dict[int, int] = attrs.field(factory=dict)
    """Number of a request -> status it is refused with."""
    broken: frozenset[int] = frozenset()
    """Numbers of requests whose stream ends early."""
    event_errors: frozenset[int] = frozenset()
    """Numbers of requests whose stream tells an error."""
    drops: Literal["none", "reused", "all"] = "none"
    """Connections that are cut instead of answering a request, which is not counted."""
    connections: set[object] = attrs.field(factory=set)
    """All that a request came through."""
    bodies: list[dict[str, Any]] = attrs.field(factory=list)
    headers: list[dict[str, str]] = attrs.field(factory=list)
    num_open: int = 0
    most_open: int = 0


def _count_words(body: dict[str, Any]) -> int:
    texts = [body["prompt"]] if "prompt" in body else [message["content"] for message in body["messages"]]
    return sum(len(text.split()) for text in texts)


def _frame(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _openai_frames(body: dict[str, Any], num_chunks: int, usage: dict[str, Any] | None) -> Iterator[bytes]:
    if "messages" in body:
        yield _frame({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for _ in range(num_chunks):
        choice = {"delta": {"content": "x "}} if "messages" in body else {"text": "x "}
        yield _frame({"choices": [{"index": 0, **choice}]})
    if usage is not None and (body.get("stream_options") or {}).get("include_usage"):
        yield _frame({"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _anthropic_frames(num_chunks: int, usage: dict[str, Any] | None) -> Iterator[bytes]:
    counts = usage or {}
    start = {}
    if usage:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counted = {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached}
        start = {**counted, "output_tokens": 1}
    end = {"output_tokens": counts["completion_tokens"]} if usage else {}
    yield b"event: message_start\n" + _frame({"type": "message_start", "message": {"usage": start}})
    yield _frame({"type": "ping"})
    for _ in range(num_chunks):
        yield _frame({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x "}})
    yield _frame({"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": end})
    yield _frame({"type": "message_stop"})
    yield b"data: [DONE]\n\n"


async def _answer(script: Script, request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if not body.get("stream"):
        return web.json_response({"choices": [{"index": 0, "text": "x"}]})
    number = len(script.bodies)
    script.bodies.append(body)
    script.headers.append(dict(request.headers))
    if number in script.statuses:
        return web.json_response({"error": {"message": "refused by script"}}, status=script.statuses[number])
    num_chunks = body["max_tokens"] if script.num_chunks is None else script.num_chunks
    usage = {
        "prompt_tokens": _count_words(body) + script.template_tokens,
        "completion_tokens": num_chunks,
        "prompt_tokens_details": {"cached_tokens": script.cached_tokens},
    }
    told = usage if script.has_usage else None
    is_anthropic = request.path.endswith("/messages")
    frames = _anthropic_frames(num_chunks, told) if is_anthropic else _openai_frames(body, num_chunks, told)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for idx, frame in enumerate(frames):
        if idx == 2 and number in script.broken:
            break
        if idx == 2 and number in script.event_errors:
            await response.write(_frame({"error": {"message": "out of pages"}}))
        await asyncio.sleep(script.gap_s)
        await response.write(frame)
    await response.write_eof()
    return response


def _build_app(script: Script) -> web.Application:
    async def answer(request: web.Request) -> web.StreamResponse:
        connection = request.transport
        assert connection is not None
        is_reused = connection in script.connections
        script.connections.add(connection)
        if script.drops == "all" or (script.drops == "reused" and is_reused):
            connection.abort()
            return web.Response()
        script.num_open += 1
        script.most_open = max(script.most_open, script.num_open)
        try:
            return await _answer(script, request)
        finally:
            script.num_open -= 1

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    app = web.Application()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        app.router.add_post(path, answer)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", models)
    return app


def serve_forever(port: int) -> None:
    """The server as a process of its own, with an unchanging script."""
    web.run_app(_build_app(Script()), host="127.0.0.1", port=port, print=None)


@contextmanager
def serve_script(script: Script) -> Iterator[str]:
    """The server in a thread of its own; yields its URL."""
    with serve_app(_build_app(script)) as url:
        yield url
