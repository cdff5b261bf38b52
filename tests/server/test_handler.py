"""One request of any protocol, without HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from astrai_server.anthropic import AnthropicResponseBuilder
from astrai_server.handler import ProtocolHandler
from astrai_server.openai import OpenAIResponseBuilder
from astrai_server.problem import DeadlineError
from astrai_server.sse import encode_json
from astrai_server.stream import FrameStream
from astrai_server.wire import InvalidRequestError, read_request
from astrai_triton.errors import EngineUnavailableError, NonFiniteLogitsError, QueueFullError
from fake_engine import FakeEngine, chat_body

BUILDERS = [OpenAIResponseBuilder(), AnthropicResponseBuilder()]


def make(engine: FakeEngine, builder: Any = BUILDERS[0], **fields: Any) -> ProtocolHandler:
    timeout_s = fields.pop("timeout_s", None)
    request = read_request(encode_json(chat_body(**fields)), builder.request_type)[0]
    return ProtocolHandler(request, engine, builder, request_id="req_1", timeout_s=timeout_s)  # type: ignore[arg-type]


def run(use: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(use())


async def join(handler: ProtocolHandler) -> list[bytes]:
    """All writes of a stream."""
    answer = await handler.handle()
    assert not isinstance(answer, bytes)
    return [answer.start(), *await push(answer)]


async def push(stream: FrameStream) -> list[bytes]:
    """All writes after the first, to a reader that is never behind."""
    writes: list[bytes] = []

    def write(data: bytes) -> bool:
        writes.append(data)
        return False

    async def wait_for_room() -> bool:
        return True

    assert await stream.push(write, wait_for_room)
    return writes


@pytest.mark.parametrize("builder", BUILDERS)
def test_the_pieces_of_a_stream_joined_are_the_whole_answer(builder: Any) -> None:
    engine = FakeEngine([" a", "", "é\n", "😀", " "])

    async def use() -> None:
        whole = await make(engine, builder).handle()
        assert isinstance(whole, bytes)
        assert rb'" a\u00e9\n\ud83d\ude00 "' in whole
        frames = b"".join(await join(make(engine, builder, stream=True)))
        assert frames.count(b'" a"') == frames.count(rb'"\u00e9\n"') == frames.count(rb'"\ud83d\ude00"') == 1

    run(use)


def test_events_that_wait_together_are_written_together() -> None:
    engine = FakeEngine(["a", "b", "c"])

    async def use() -> None:
        answer = await make(engine, stream=True).handle()
        assert not isinstance(answer, bytes)
        writes = [answer.start()]
        await asyncio.sleep(0.05)
        writes += await push(answer)
        assert [data.count(b"\n\n") for data in writes] == [1, 6]

    run(use)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_handler_cancels_its_task(builder: Any, stream: bool) -> None:
    engine = FakeEngine(["a", "b"])
    engine.is_held = True

    async def use() -> None:
        handler = make(engine, builder, stream=stream)
        work = asyncio.ensure_future(join(handler) if stream else handler.handle())
        await asyncio.sleep(0.05)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        handler.close()
        await asyncio.sleep(0.05)
        assert engine.num_cancelled == 1

    run(use)


def test_a_finished_task_is_not_cancelled() -> None:
    engine = FakeEngine()

    async def use() -> None:
        handler = make(engine)
        await handler.handle()
        cancelled: list[None] = []
        assert handler._choices is not None
        for reader in handler._choices.readers:
            reader.task.cancel = lambda: cancelled.append(None)  # type: ignore[method-assign]
        handler.close()
        assert not cancelled

    run(use)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refusal", [QueueFullError(1, 1.0), EngineUnavailableError("down")])
def test_a_refusal_comes_before_the_first_byte(refusal: Exception, stream: bool) -> None:
    with pytest.raises(type(refusal)):
        run(make(FakeEngine(refuse=refusal), stream=stream).handle)


def test_what_the_engine_finds_wrong_is_the_clients_mistake() -> None:
    with pytest.raises(InvalidRequestError, match="prompt_ids: wanted"):
        run(make(FakeEngine(refuse=ValueError("prompt_ids: wanted at least one token"))).handle)


def test_a_text_that_cannot_be_tokenised_is_the_clients_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    def fail(*_: Any, **__: Any) -> list[int]:
        raise ValueError("no such character")

    monkeypatch.setattr(engine.tokenizer, "encode_chat", fail)
    with pytest.raises(InvalidRequestError, match="messages: no such character"):
        run(make(engine).handle)


def test_a_failed_task_raises_its_error() -> None:
    with pytest.raises(NonFiniteLogitsError):
        run(make(FakeEngine(["a"], finish="error", error=NonFiniteLogitsError("nan"))).handle)


def test_a_task_the_engine_cancelled_is_unavailable() -> None:
    with pytest.raises(EngineUnavailableError):
        run(make(FakeEngine(["a"], finish="cancelled")).handle)


@pytest.mark.parametrize("builder", BUILDERS)
def test_the_deadline_ends_a_whole_answer(builder: Any) -> None:
    engine = FakeEngine()
    engine.is_held = True
    with pytest.raises(DeadlineError, match=r"0\.05 s"):
        run(make(engine, builder, timeout_s=0.05).handle)
    assert engine.num_cancelled == 1


@pytest.mark.parametrize("builder", BUILDERS)
def test_the_deadline_ends_a_stream_with_an_error(builder: Any) -> None:
    engine = FakeEngine(["a", "b"])
    engine.is_held = True

    async def use() -> None:
        handler = make(engine, builder, timeout_s=0.05, stream=True)
        writes = await join(handler)
        assert b"timeout_error" in writes[-1]
        assert b"[DONE]" not in writes[-1]
        handler.close()

    run(use)


def test_a_fault_of_the_builder_in_mid_stream_ends_the_stream_and_the_task(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    builder = OpenAIResponseBuilder()

    def fail(*_: Any) -> bytes:
        raise RuntimeError("secret")

    monkeypatch.setattr(builder, "format_chunk", fail)
    engine = FakeEngine(["a", "b", "c"])
    engine.is_held = True

    async def use() -> None:
        handler = make(engine, builder, stream=True)
        writes = await join(handler)
        assert b"api_error" in writes[-1]
        assert b"secret" not in b"".join(writes)
        handler.close()
        await asyncio.sleep(0.05)
        assert engine.num_cancelled == 1

    with caplog.at_level(logging.ERROR, logger="astrai.server"):
        run(use)
    assert "secret" in caplog.text


def test_preparing_does_not_stall_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    ticks = 0

    async def use() -> None:
        nonlocal ticks
        loop = asyncio.get_running_loop()
        encode = engine.tokenizer.encode_chat

        def slow(*args: Any, **options: Any) -> list[int]:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.02), loop).result(5)
            return encode(*args, **options)

        monkeypatch.setattr(engine.tokenizer, "encode_chat", slow)
        # Blocks for ever if the loop itself runs the tokenizer.
        assert await make(engine).handle()
        ticks += 1

    run(use)
    assert ticks == 1


def test_the_report_counts_tokens_and_times() -> None:
    async def use() -> None:
        handler = make(FakeEngine(["a", "b", "c"], cached_tokens=4, gap_s=0.01))
        await handler.handle()
        text = str(handler.report)
        assert " finish=stop in=19 (4 cached) out=3 ttft=" in text
        assert " itl=" in text

    run(use)
