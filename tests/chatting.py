"""``astrai chat`` in tests: typing into it, and servers that say what they are told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from aiohttp import web
from click.testing import CliRunner, Result

from app_thread import serve_app
from astrai_server.cli import main

CLEAN = dict.fromkeys(("ASTRAI_API_KEY", "OPENAI_API_KEY", "FORCE_COLOR", "HTTP_PROXY", "http_proxy"))
"""Variables of whoever runs the tests that would change what is tested."""


def chat(url: str, *args: str, stdin: str | bytes = "", env: dict[str, str] | None = None) -> Result:
    """Run the command with a stdin that is no terminal."""
    runner = CliRunner(env={**CLEAN, **(env or {})})
    return runner.invoke(main, ["chat", "--url", url, *args], input=stdin, prog_name="astrai")


def talk(url: str, *lines: str, flags: tuple[str, ...] = ()) -> Result:
    """Type lines; a failure ends nothing, so the status is 0."""
    result = chat(url, "--interactive", *flags, stdin="".join(f"{line}\n" for line in lines))
    assert result.exit_code == 0, result.output
    assert "Traceback" not in result.output
    return result


@attrs.define
class Reply:
    """What an odd server answers to a question."""

    pieces: tuple[bytes, ...] = ()
    status: int = 200
    type: str = "text/event-stream"
    headers: dict[str, str] = attrs.field(factory=dict)
    is_cut: bool = False
    """Whether the connection breaks before the body ends."""


@attrs.define
class OddServer:
    """Says what it is told to, one reply per question, the last one again and again."""

    replies: list[Reply]
    models: Reply
    url: str = ""
    bodies: list[dict[str, Any]] = attrs.field(factory=list)
    keys: list[str | None] = attrs.field(factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization"))
        if request.method == "GET":
            return await self._send(request, self.models)
        self.bodies.append(await request.json())
        return await self._send(request, self.replies.pop(0) if len(self.replies) > 1 else self.replies[0])

    async def _send(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        headers = {"content-type": reply.type} | reply.headers
        response = web.StreamResponse(status=reply.status, headers=headers)
        await response.prepare(request)
        for piece in reply.pieces:
            await response.write(piece)
        if reply.is_cut and request.transport is not None:
            request.transport.close()
        return response


@contextmanager
def odd_server(*replies: Reply, models: Reply | None = None) -> Iterator[OddServer]:
    listed = Reply((b'{"data": [{"id": "odd"}]}',), type="application/json")
    server = OddServer(list(replies), models or listed)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    with serve_app(app) as server.url:
        yield server


def frame(content: str = "", **fields: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": content, **fields.pop("delta", {})}, **fields}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


END = frame(finish_reason="stop")
DONE = b"data: [DONE]\n\n"
GOOD = Reply((frame("fine"), END, DONE))
