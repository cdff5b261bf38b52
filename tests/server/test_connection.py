"""Connections before a request is a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import pytest

from astrai_server import run
from fake_engine import FakeEngine, build_settings, serve

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

Use = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def talk(use: Use, **options: Any) -> None:
    """Run ``use`` over a raw connection; two seconds at most."""

    async def run() -> None:
        async with serve(FakeEngine(), build_settings(**options)) as client, asyncio.timeout(5):
            url = urlsplit(client.url)
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            await use(reader, writer)
            writer.close()

    asyncio.run(run())


async def read_response(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """Status and JSON body of the next response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next(int(line.split(":")[1]) for line in head if line.startswith("content-length"))
    return int(head[0].split()[1]), json.loads(await reader.readexactly(length))


@pytest.mark.parametrize("data", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_client_that_does_not_finish_its_headers_is_closed(data: bytes) -> None:
    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        assert await reader.read() == b""

    talk(use, header_timeout_s=0.1)


def test_dripping_bytes_do_not_extend_the_time_for_headers() -> None:
    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed = asyncio.ensure_future(reader.read())
        writer.write(b"GET /health HTTP/1.1\r\n")
        while not closed.done():
            writer.write(b"X-A: b\r\n")
            await asyncio.sleep(0.02)
        assert closed.result() == b""

    talk(use, header_timeout_s=0.1)


def test_an_idle_connection_stays_open_but_its_next_headers_are_timed_too() -> None:
    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(HEALTH)
            assert (await read_response(reader))[0] == 200
            await asyncio.sleep(0.2)
        writer.write(HEALTH[:9])
        assert await reader.read() == b""

    talk(use, header_timeout_s=0.1)


def test_a_long_answer_is_not_cut_by_the_time_for_headers() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def run() -> None:
        engine = FakeEngine(["a", "b"])
        engine.is_held = True
        async with serve(engine, build_settings(header_timeout_s=0.1)) as client, asyncio.timeout(5):
            url = urlsplit(client.url)
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(head)
            await asyncio.sleep(0.15)
            writer.write(body)
            await asyncio.sleep(0.15)
            engine.is_held = False
            assert (await read_response(reader))[0] == 200
            writer.close()

    asyncio.run(run())


def test_a_body_that_does_not_arrive_is_a_408() -> None:
    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        status, body = await read_response(reader)
        assert (status, body["error"]["code"]) == (408, "body_timeout")

    talk(use, body_timeout_s=0.1)


@pytest.mark.parametrize(
    "data", [b"hello\r\n\r\n", b"GET / HTTP/9.x\r\n\r\n", b"\x16\x03\x01\x02\x00\r\n\r\n"]
)
def test_what_is_not_http_gets_the_error_body(data: bytes) -> None:
    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        status, body = await read_response(reader)
        assert (status, body["error"]["code"]) == (400, "malformed_request")
        assert body["request_id"].startswith("req_")
        assert await reader.read() == b""

    talk(use)


def test_an_expectation_that_cannot_be_met_gets_the_error_body() -> None:
    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nExpect: tea\r\nContent-Length: 2\r\n\r\n{}")
        status, body = await read_response(reader)
        assert (status, body["error"]["code"]) == (417, "http_error")

    talk(use)


def test_a_client_may_wait_for_leave_to_send_its_body() -> None:
    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"{}")
        assert (await read_response(reader))[0] == 422

    talk(use)


def test_dripping_bytes_do_not_extend_the_time_for_a_body() -> None:
    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = asyncio.ensure_future(read_response(reader))
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not answer.done():
            writer.write(b"1\r\n \r\n")
            await asyncio.sleep(0.02)
        status, body = answer.result()
        assert (status, body["error"]["code"]) == (408, "body_timeout")

    talk(use, body_timeout_s=0.2)


def test_an_idle_connection_is_closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "KEEPALIVE_S", 0.1)

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEALTH)
        assert (await read_response(reader))[0] == 200
        assert await reader.read() == b""

    talk(use)
