"""Bodies that end in the middle or cannot be read are no fault of the server: one line in the log."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct

import pytest

from fake_engine import FakeEngine, build_settings, serve

HEAD = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"


async def send_and_reset(port: int, data: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    # The request is at hand and waits for its body.
    await asyncio.sleep(0.02)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("data", [HEAD, HEAD + b'{"messages": ['])
def test_a_reset_in_the_middle_of_a_body_is_no_error_in_the_log(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def run() -> None:
        async with serve(FakeEngine(), build_settings()) as client:
            port = int(client.url.rpartition(":")[2])
            await asyncio.gather(*(send_and_reset(port, data) for _ in range(20)))
            async with asyncio.timeout(10):
                while client.gate.num_inside:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert (await client.message()).status == 200

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert sum(" 499" in record.getMessage() for record in caplog.records) == 20


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
@pytest.mark.parametrize("has_more", [False, True])
def test_a_body_in_another_encoding_than_it_says_is_a_400_and_no_error_in_the_log(
    encoding: str, has_more: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> bytes:
        async with serve(FakeEngine()) as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
            headers = f"Host: x\r\nContent-Encoding: {encoding}\r\nContent-Length: {20 if has_more else 10}"
            writer.write(f"POST /v1/messages HTTP/1.1\r\n{headers}\r\n\r\n".encode() + b"\xff" * 10)
            async with asyncio.timeout(10):
                data = await reader.read()
            writer.close()
            return data

    data = asyncio.run(run())
    assert data.split()[1] == b"400"
    assert b'"code":"malformed_body"' in data or b'"code":"malformed_request"' in data
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_fault_outside_of_the_application_is_still_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def explode(*_: object) -> None:
        raise ConnectionError("of something else than the client")

    monkeypatch.setattr("astrai_server.app._list_models", explode)

    async def run() -> int:
        async with serve(FakeEngine()) as client:
            return (await client.send("GET", "/v1/models")).status

    assert asyncio.run(run()) == 500
    assert "outside of the application" in caplog.text
