"""Streams as they are pushed to the socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from astrai_triton.engine import InferenceEngine
from fake_engine import FakeEngine, build_settings, serve
from fakes import ByteTokenizer, ScriptedModel

TEXT_LEN = 400


async def open_stream(url: str, max_tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has asked and reads nothing yet; its socket takes little."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"messages": messages, "stream": True, "max_tokens": max_tokens, "temperature": 0})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    await writer.drain()
    return reader, writer


def read_text(raw: bytes) -> str:
    frames = [line for line in raw.decode().split("\n") if line.startswith("data: {")]
    choices = [json.loads(line.removeprefix("data: "))["choices"] for line in frames]
    return "".join(choice[0]["delta"].get("content", "") for choice in choices if choice)


@pytest.mark.parametrize("num_streams", [1, 12])
def test_a_reader_that_pauses_misses_nothing(num_streams: int) -> None:
    async def use(engine: Any) -> list[str]:
        async with serve(engine) as client:
            streams = [await open_stream(client.url, TEXT_LEN) for _ in range(num_streams)]
            await asyncio.sleep(0.3)
            texts = []
            for reader, writer in streams:
                raw = await asyncio.wait_for(read_to_done(reader), 20)
                texts.append(read_text(raw))
                writer.close()
            return texts

    sizes: dict[str, int] = {"max_batch_size": 16, "max_seq_len": 512, "n_tokens": 16 * 512}
    with InferenceEngine(ScriptedModel(), ByteTokenizer(), **sizes) as engine:  # type: ignore[arg-type]
        expected = engine.generate("<user>hi<assistant>", temperature=0.0, max_tokens=TEXT_LEN)
        assert asyncio.run(use(engine)) == [expected] * num_streams


def test_a_client_that_stops_reading_is_cut_off_and_its_task_ends() -> None:
    # 20 MB: more than all the buffers on the way hold.
    engine = FakeEngine(["x" * 10_000] * 2_000, gap_s=0.001)

    async def use() -> None:
        async with serve(engine, build_settings(write_timeout_s=0.3)) as client:
            _, writer = await open_stream(client.url, 2_000)
            for _ in range(200):
                await asyncio.sleep(0.05)
                if engine.num_cancelled:
                    break
            assert engine.num_cancelled == 1
            writer.close()

    asyncio.run(use())


def test_a_reader_that_is_slower_than_the_engine_gets_it_all() -> None:
    engine = FakeEngine(["x" * 10_000] * 1_000)

    async def use() -> bytes:
        async with serve(engine) as client:
            reader, writer = await open_stream(client.url, 2_000)
            await asyncio.sleep(0.5)
            raw = await asyncio.wait_for(read_to_done(reader), 30)
            writer.close()
            return raw

    assert read_text(asyncio.run(use())) == "x" * 10_000_000


async def read_to_done(reader: asyncio.StreamReader) -> bytes:
    raw = bytearray()
    while b"data: [DONE]\n\n" not in raw[-200:]:
        data = await reader.read(1 << 16)
        assert data, "the connection was closed early"
        raw += data
    return unchunk(bytes(raw)[raw.index(b"\r\n\r\n") + 4 :])


def unchunk(raw: bytes) -> bytes:
    """The body of a chunked response, as far as it came."""
    body, at = bytearray(), 0
    while at < len(raw):
        start = raw.index(b"\r\n", at) + 2
        size = int(raw[at : start - 2], 16)
        body += raw[start : start + size]
        if not size:
            break
        at = start + size + 2
    return bytes(body)
