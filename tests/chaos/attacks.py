"""Single attacks on a connection: bytes, timing, disconnects. Each raises where the server errs."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any

import attrs

from chaos.client import Answer, BrokenAnswerError, Client, ClosedError, encode, format_request
from chaos.generate import RequestGenerator
from chaos.reply import find_fault, read_reply
from chaos.traps import HEADER_TIMEOUT_S, MAX_BODY_BYTES, READ_TIMEOUT_S

PATIENCE_S = 20.0
"""How late a time limit of the server may strike on a busy machine."""
PATHS = ("/v1/chat/completions", "/v1/messages")


class UnexpectedError(Exception):
    """The server did what it must not."""


@attrs.frozen
class Target:
    """What an attack gets."""

    port: int
    rng: random.Random
    generator: RequestGenerator


Attack = Callable[[Target], Awaitable[int]]
"""Returns how many whole answers were read."""


def require(answer: Answer, allowed: Collection[int], what: str, *, is_head: bool = False) -> None:
    """Raise unless the answer is sound and its status is one of ``allowed``."""
    fault = find_fault(answer, is_head=is_head)
    if fault is not None:
        raise UnexpectedError(f"{what}: {answer.status}: {fault}")
    if answer.status not in allowed:
        raise UnexpectedError(f"{what}: wanted {sorted(allowed)}, got {answer.status} {answer.body[:300]!r}")


def make_chat(rng: random.Random, *, max_tokens: int = 12, **fields: Any) -> tuple[str, bytes]:
    """An honest request of either protocol: path and bytes of the body."""
    text = "".join(rng.choices("abcdefgh ", k=rng.randint(1, 120)))
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    body |= {"temperature": 0, "stream": rng.random() < 0.5}
    return rng.choice(PATHS), encode(body | fields)


async def _read_or_closed(client: Client) -> Answer | None:
    try:
        return await client.read_answer()
    except ClosedError:
        return None


async def garbage(target: Target) -> int:
    """Bytes that are no HTTP: a 400, or silence and a closed connection."""
    rng = target.rng
    data = rng.choice(
        (
            rng.randbytes(rng.randint(1, 3000)),
            b"GET / HTTP/1.1\r\n" + rng.randbytes(50) + b"\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\r\n" * rng.randint(1, 50) + b"\x00",
            b"GET /" + b"a" * rng.choice((9000, 70000)) + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nx: " + b"y" * rng.choice((9000, 70000)) + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 40000 + b"\r\n",
            b"GET / HTTP/1.1\r\nhost: x\r\n folded: y\r\n\r\n",
            b"GET / HTTP/1.1\nhost: x\n\n",
        )
    )
    client = await Client.open(target.port)
    try:
        await client.send(data)
        if rng.random() < 0.2:
            client.end()
        answer = await _read_or_closed(client)
    except ConnectionError:
        return 0
    finally:
        client.close()
    if answer is None:
        return 0
    require(answer, {400, 404, 405, 408, 413, 414, 431, 505}, f"{data[:60]!r}")
    return 1


async def cut_request(target: Target) -> int:
    """The first bytes of an honest request, and then no more."""
    path, body = make_chat(target.rng)
    data = format_request("POST", path, body)
    client = await Client.open(target.port)
    await client.send(data[: target.rng.randrange(len(data))])
    target.rng.choice((client.close, client.abort))()
    return 0


async def leave_early(target: Target) -> int:
    """A whole request, and gone after any number of bytes of the answer."""
    path, body = make_chat(target.rng, max_tokens=60)
    client = await Client.open(target.port)
    await client.send(format_request("POST", path, body, {"connection": "close"}))
    await client.read(target.rng.choice((0, 1, 20, 300, 1000, 3000)))
    target.rng.choice((client.close, client.abort))()
    return 0


async def _expect_cut_off(client: Client, limit_s: float, what: str, *, status: int | None) -> int:
    """The server must lose patience after ``limit_s``, with an answer of ``status`` or without one."""
    async with asyncio.timeout(limit_s + PATIENCE_S):
        answer = await _read_or_closed(client)
    if answer is None:
        return 0
    require(answer, {status} if status else (), what)
    return 1


async def slow_headers(target: Target) -> int:
    """Headers that come a few bytes at a time, and never end."""
    client = await Client.open(target.port)
    try:
        for byte in b"POST /v1/messages HTTP/1.1\r\nx"[: target.rng.randint(0, 30)]:
            await client.send(bytes((byte,)))
        return await _expect_cut_off(client, HEADER_TIMEOUT_S, "slow headers", status=None)
    except TimeoutError:
        raise UnexpectedError("headers that never end are waited for without end") from None
    finally:
        client.close()


async def slow_body(target: Target) -> int:
    """A body that never ends: 408."""
    path, body = make_chat(target.rng)
    client = await Client.open(target.port)
    try:
        data = format_request("POST", path, body)
        await client.send(data[: -target.rng.randint(1, len(body))])
        return await _expect_cut_off(client, READ_TIMEOUT_S, "a slow body", status=408)
    except TimeoutError:
        raise UnexpectedError("a body that never ends is waited for without end") from None
    finally:
        client.close()


async def large_body(target: Target) -> int:
    """More than the server takes, announced, in chunks, or once it is unpacked: 413."""
    rng = target.rng
    path, size = rng.choice(PATHS), MAX_BODY_BYTES + rng.choice((1, 1 << 16, 3 << 20))
    client = await Client.open(target.port)
    try:
        kind = rng.randrange(3)
        if kind == 0:
            data = format_request("POST", path, b" " * size)
        elif kind == 1:
            bomb = zlib.compress(b" " * (16 * size), 9, wbits=31)
            data = format_request("POST", path, bomb, {"content-encoding": "gzip"})
        else:
            chunk = b"2000\r\n" + b" " * 0x2000 + b"\r\n"
            head = format_request("POST", path, headers={"transfer-encoding": "chunked"})
            data = head + chunk * (size // 0x2000 + 1) + b"0\r\n\r\n"
        # It may answer early, and not want the rest.
        with suppress(ConnectionError):
            await client.send(data)
        answer = await _read_or_closed(client)
    except BrokenAnswerError:
        return 0
    finally:
        client.close()
    if answer is None:
        # A reset for the bytes that were not read may overtake the answer.
        return 0
    require(answer, {413}, f"a body of {size} bytes")
    return 1


async def wrong_framing(target: Target) -> int:
    """Lengths that contradict or make no sense: refused, never taken for two requests."""
    rng = target.rng
    headers, body = rng.choice(
        (
            ("content-length: 5\r\ncontent-length: 6\r\n", b"{}{}{}"),
            ("content-length: -1\r\n", b"{}"),
            ("content-length: 1e3\r\n", b"{}"),
            ("content-length: " + "9" * 40 + "\r\n", b"{}"),
            ("content-length: 2\r\ntransfer-encoding: chunked\r\n", b"0\r\n\r\nGET /health HTTP/1.1\r\n\r\n"),
            ("transfer-encoding: chunked\r\n", b"zz\r\n{}\r\n0\r\n\r\n"),
            ("transfer-encoding: chunked\r\n", b"-2\r\n{}\r\n0\r\n\r\n"),
            ("transfer-encoding: gzip\r\n", b"{}"),
            ("content-encoding: gzip\r\ncontent-length: 2\r\n", b"{}"),
            ("content-encoding: deflate\r\ncontent-length: 4\r\n", b"\x00\x01\x02\x03"),
            ("expect: 200-maybe\r\ncontent-length: 2\r\n", b"{}"),
        )
    )
    client = await Client.open(target.port)
    try:
        head = f"POST {rng.choice(PATHS)} HTTP/1.1\r\nhost: x\r\n{headers}\r\n"
        await client.send(head.encode() + body)
        answer = await _read_or_closed(client)
    except ConnectionError:
        return 0
    finally:
        client.close()
    if answer is not None:
        require(answer, {400, 408, 411, 413, 417, 422}, repr(headers))
    return int(answer is not None)


async def wrong_route(target: Target) -> int:
    """Methods and paths that do not exist."""
    rng = target.rng
    method = rng.choice(("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "POST", "FOO", "get"))
    path = rng.choice(
        (
            "/", "/v1", "/v1/messages/", "//", "/v1/../health", "/%00", "/%zz", "/health?x=%ff", "*", "/a b",
            "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/" + "x" * 5000, "http://example.org/v1/messages",
            "/v1/chat/completions", "/openapi.json/", "/debug/prefix?prompt=&salt=%F0", "/\u00fc",
        )
    )  # fmt: skip
    client = await Client.open(target.port)
    try:
        await client.send(format_request(method, path))
        answer = await client.read_answer(is_head=method == "HEAD")
    except (ClosedError, ConnectionError):
        return 0
    finally:
        client.close()
    require(answer, {200, 400, 404, 405, 414, 422}, f"{method} {path[:60]}", is_head=method == "HEAD")
    return 1


async def pipeline(target: Target) -> int:
    """Several requests in one write: as many answers, in that order."""
    rng = target.rng
    names = [f"pipe-{i}-{rng.randrange(1 << 30)}" for i in range(rng.randint(2, 8))]
    data = b""
    for name in names:
        if rng.random() < 0.5:
            data += format_request("GET", "/health", headers={"x-request-id": name})
        else:
            path, body = make_chat(rng, max_tokens=4)
            data += format_request("POST", path, body, {"x-request-id": name})
    client = await Client.open(target.port)
    try:
        await client.send(data)
        for name in names:
            answer = await client.read_answer()
            require(answer, {200}, "a request in a pipeline")
            if answer.headers["x-request-id"] != name:
                raise UnexpectedError(f"the answer to {name} belongs to {answer.headers['x-request-id']}")
    finally:
        client.close()
    return len(names)


async def keep_alive(target: Target) -> int:
    """Good and bad requests in turn on one connection: every answer belongs to its request."""
    rng, generator = target.rng, target.generator
    client = await Client.open(target.port)
    count = 0
    try:
        for i in range(30):
            path, body = make_chat(rng, max_tokens=3)
            is_good = rng.random() < 0.4
            if not is_good:
                path = rng.choice(PATHS)
                body = encode(generator.make_invalid(rng, path)[0])
            name = f"keep-{i}-{rng.randrange(1 << 30)}"
            await client.send(format_request("POST", path, body, {"x-request-id": name}))
            answer = await client.read_answer()
            count += 1
            require(answer, {200} if is_good else {400, 422}, f"request {i} of a connection: {body[:200]!r}")
            if answer.headers["x-request-id"] != name:
                raise UnexpectedError(f"the answer to {name} belongs to {answer.headers['x-request-id']}")
            if answer.headers.get("connection", "").lower() == "close":
                client.close()
                client = await Client.open(target.port)
    finally:
        client.close()
    return count


async def idle(target: Target) -> int:
    """Many connections without a word: closed in time."""
    clients = [await Client.open(target.port) for _ in range(60)]
    try:
        for client in clients:
            await _expect_cut_off(client, HEADER_TIMEOUT_S, "an idle connection", status=None)
    except TimeoutError:
        raise UnexpectedError("an idle connection is kept without end") from None
    finally:
        for client in clients:
            client.close()
    return 0


async def slow_reader(target: Target) -> int:
    """A stream that is read a few bytes at a time arrives whole all the same."""
    path, body = make_chat(target.rng, max_tokens=40, stream=True)
    client = await Client.open(target.port, is_tiny=True)
    try:
        await client.send(format_request("POST", path, body))
        # It waits in the buffers of both sides.
        await asyncio.sleep(target.rng.uniform(0.0, READ_TIMEOUT_S / 2))
        answer = await client.read_answer()
    finally:
        client.close()
    require(answer, {200}, "a slow reader")
    if read_reply(answer).finish is None:
        raise UnexpectedError("a slow reader was cut off")
    return 1


async def no_reader(target: Target) -> int:
    """Streams that nobody reads are cut off, and the rest of the pipeline with them."""
    client = await Client.open(target.port, is_tiny=True)
    try:
        with suppress(ConnectionError):
            for _ in range(6):
                # The name of the model comes back in every frame, and fills the buffers.
                name = "m" * 256
                _, body = make_chat(target.rng, max_tokens=160, stream=True, model=name, ignore_eos=True)
                await client.send(format_request("POST", PATHS[0], body))
            await asyncio.sleep(3 * READ_TIMEOUT_S)
    finally:
        client.abort()
    return 0


async def churn(target: Target) -> int:
    """Connections that come and go."""
    for _ in range(20):
        client = await Client.open(target.port)
        target.rng.choice((client.close, client.abort))()
    return 0


ATTACKS: tuple[tuple[Attack, int], ...] = (
    (garbage, 80),
    (cut_request, 80),
    (leave_early, 120),
    (wrong_framing, 60),
    (wrong_route, 80),
    (large_body, 24),
    (pipeline, 30),
    (keep_alive, 16),
    (churn, 16),
    (slow_reader, 16),
    (slow_headers, 16),
    (slow_body, 16),
    (idle, 3),
    (no_reader, 3),
)
"""Each with how often a short run does it."""
