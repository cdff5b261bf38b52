"""Clients of one server: ``python -m astrai_bench.stream_client PORT STREAMS TOKENS``.

Prints the tokens that all streams brought together.
"""

from __future__ import annotations

import asyncio
import json
import sys

END = b"data: [DONE]\n\n"


async def read_stream(port: int, num_tokens: int) -> int:
    """One streamed chat completion; returns the number of text chunks that came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages = [{"role": "user", "content": "hello"}]
    body = json.dumps({"messages": messages, "stream": True, "max_tokens": num_tokens, "temperature": 0})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    num_chunks, tail = 0, b""
    while END not in tail:
        data = await reader.read(1 << 16)
        if not data:
            break
        num_chunks += data.count(b'"content":"')
        tail = (tail + data)[-200:]
    writer.close()
    # The chunk with the role has an empty content.
    return num_chunks - 1


async def read_streams(port: int, num_streams: int, num_tokens: int) -> int:
    """All streams at once."""
    return sum(await asyncio.gather(*(read_stream(port, num_tokens) for _ in range(num_streams))))


if __name__ == "__main__":
    port, num_streams, num_tokens = map(int, sys.argv[1:])
    print(asyncio.run(read_streams(port, num_streams, num_tokens)))  # noqa: T201 - what it is for
