"""Several choices of one request: seeds, usage, faults, leaving clients, pages."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from answers import (
    CHAT,
    COMPLETIONS,
    END,
    connect_openai,
    load_frames,
    make_body,
    read,
    read_one,
    run_engine,
    send,
    usage_of,
)
from fake_engine import Answer, Client, FakeEngine, ask, build_settings, chat_body
from fakes import EOS, Context, DistinctModel, answer_script

SAMPLED = {"temperature": 1.2, "top_k": 0, "max_tokens": 12}


FORKED = {"temperature": 1, "seed": 0, "n": 8}


class ForkModel(DistinctModel):
    """An answer begins with any of the letters a to h; the script says how it goes on."""

    def logits_after(self, context: Context) -> torch.Tensor:
        logits = torch.full((self.config.vocab_size,), -30.0)
        logits[self.script(context) if answer_of(context) else slice(ord("a"), ord("i"))] = 0.0
        return logits


def answer_of(context: Context) -> bytes:
    """What the assistant has said so far."""
    return bytes(token_id for token_id in context if token_id < EOS).split(END.encode())[-1]


def chat(engine: Any, **fields: Any) -> Answer:
    return send(engine, CHAT, **fields)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def slow_down(seconds: float = 0.003) -> Callable[[list[Context]], None]:
    never = threading.Event()

    def wait(_: list[Context]) -> None:
        never.wait(seconds)

    return wait


# What comes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_greedy_choices_are_equal(path: str, stream: bool) -> None:
    prompt = {"prompt": "hi"} if path == COMPLETIONS else {}
    with run_engine() as engine:
        readings = read(send(engine, path, n=3, max_tokens=9, stream=stream, **prompt))
        assert readings == [read_one(send(engine, path, max_tokens=9, **prompt))] * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_choice_j_is_what_seed_plus_j_gives_alone(path: str, stream: bool) -> None:
    prompt: dict[str, Any] = {"prompt": ["hi", "there"]} if path == COMPLETIONS else {}
    with run_engine(spread=9.0) as engine:

        async def use(client: Client) -> None:
            body = make_body(**SAMPLED, **prompt)
            together = read(await client.post(path, body | {"seed": 40, "n": 4, "stream": stream}))
            alone = [read(await client.post(path, body | {"seed": 40 + j})) for j in range(4)]
            num_prompts = len(alone[0])
            assert together == [alone[j][i] for i in range(num_prompts) for j in range(4)]
            assert len({reading.text for reading in together[:4]}) == 4

        ask(engine, use)


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_the_largest_seeds_have_choices_too(seed: int) -> None:
    with run_engine(spread=9.0) as engine:
        first, second = (read(chat(engine, seed=seed, n=3, **SAMPLED)) for _ in range(2))
    assert first == second
    assert len({reading.text for reading in first}) == 3


def test_without_a_seed_choices_differ() -> None:
    with run_engine(spread=9.0) as engine:
        texts = {reading.text for reading in read(chat(engine, n=8, **SAMPLED))}
    assert len(texts) > 4


def test_a_stream_begins_with_the_role_of_each_choice() -> None:
    with run_engine() as engine:
        frames = load_frames(chat(engine, n=3, max_tokens=10, stream=True))
    choices = [choice for frame in frames[:3] for choice in frame["choices"]]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert all(choice["delta"] == {"role": "assistant", "content": ""} for choice in choices)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_no_choice_of_a_stream_waits_for_another(path: str) -> None:
    engine = FakeEngine(["a", "b"])
    engine.is_held = True
    body = make_body(n=3, stream=True, **({"prompt": "x"} if path == COMPLETIONS else {}))

    async def use(client: Client) -> bytes:
        data = b""
        async with client.session.post(client.url + path, json=body) as response:
            async for part in response.content.iter_any():
                data += part
                # The end comes only once each choice has said something.
                engine.is_held = data.count(b'"a"') < 3
        return data

    answer = Answer(200, {"content-type": "text/event-stream"}, ask(engine, use))
    assert [reading.text for reading in read(answer)] == ["ab"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_different_lengths_each_end_once(stream: bool) -> None:
    def script(context: Context) -> int:
        """The first letter says how many more come."""
        said = answer_of(context) or b"a"
        return EOS if len(said) > said[0] - ord("a") else ord("x")

    with run_engine(script, kind=ForkModel) as engine:
        readings = read(chat(engine, max_tokens=6, stream=stream, **FORKED))
    assert len({reading.text for reading in readings}) > 3
    for reading in readings:
        num_wanted = 1 + ord(reading.text[0]) - ord("a")
        assert len(reading.text) == min(6, num_wanted)
        assert reading.reason == ("stop" if num_wanted < 6 else "length")


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_the_prompt_once_and_the_tokens_of_all(stream: bool) -> None:
    with run_engine(answer_script({END: "Hello"})) as engine:
        usage = usage_of(chat(engine, n=3, stream=stream))
    counts = [usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")]
    assert counts == [19, 18, 37]


# What it costs


def test_the_prompt_of_all_choices_is_computed_once() -> None:
    computed: list[int] = []

    def count(contexts: list[Context]) -> None:
        computed.append(len(contexts))

    with run_engine(on_forward=count) as engine:
        answer = chat(engine, content="x" * 400, n=4, max_tokens=1)
        lengths = [q_len for forward in engine.model.forwards for q_len in forward]
        stats = engine.get_stats()
    assert usage_of(answer)["prompt_tokens_details"]["cached_tokens"] == 0
    prompt_len = usage_of(answer)["prompt_tokens"]
    assert sum(lengths) < prompt_len + 3 * 8
    assert stats["cache_hit_rate"] > 0.7


def test_a_cached_prompt_of_several_choices_is_counted_once() -> None:
    async def use(client: Client) -> list[Answer]:
        return [await client.post(CHAT, make_body(content="x" * 40, n=3, max_tokens=2)) for _ in range(2)]

    with run_engine() as engine:
        first, second = ask(engine, use)
    assert usage_of(first)["prompt_tokens_details"]["cached_tokens"] == 0
    assert (
        usage_of(second)["prompt_tokens_details"]["cached_tokens"]
        == (usage_of(second)["prompt_tokens"] - 1) // 4 * 4
    )


def test_choices_that_do_not_fit_together_all_come_in_the_end() -> None:
    """A pool for about two of six, and a batch of four."""
    with run_engine(spread=9.0, n_tokens=160, max_batch_size=4) as engine:
        together = read(chat(engine, n=6, seed=1, **(SAMPLED | {"max_tokens": 60})))
        assert engine.get_stats()["preemptions"] > 0
    with run_engine(spread=9.0) as engine:
        assert read(chat(engine, n=6, seed=1, **(SAMPLED | {"max_tokens": 60}))) == together


# What goes wrong


def fail_in_some(contexts: list[Context]) -> None:
    """A fault in choices that begin with a to d, some way in."""
    if any(answer_of(context)[:1] in (b"a", b"b", b"c", b"d") and len(context) > 30 for context in contexts):
        raise RuntimeError("secret")


@pytest.mark.parametrize("stream", [False, True])
def test_one_choice_that_fails_fails_the_answer_and_cancels_the_rest(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        run_engine(kind=ForkModel, on_forward=fail_in_some) as engine,
        caplog.at_level(logging.ERROR, "astrai.server"),
    ):
        answer = chat(engine, stream=stream, max_tokens=500, **FORKED)
        assert engine.drain(10)
        stats = engine.get_stats()
    assert stats["finished"]["error"] >= 1
    assert stats["finished"]["cancelled"] >= 1
    assert sum(stats["finished"].values()) == 8
    assert stats["total_tokens"] < 8 * 400
    if stream:
        assert (answer.status, answer.body.count(b'"error"')) == (200, 1)
        assert b"[DONE]" not in answer.body
        assert json.loads(answer.frames[-1].removeprefix("data: "))["error"]["type"] == "api_error"
    else:
        assert answer.status == 500
        assert answer.json["error"]["type"] == "api_error"
    assert b"secret" not in answer.body
    # The log has the traceback of the fault itself.
    records = [record for record in caplog.records if record.name == "astrai.server" and record.exc_info]
    assert len(records) == 1
    assert records[0].exc_info is not None
    assert "secret" in str(records[0].exc_info[1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_all_choices(stream: bool) -> None:
    with run_engine(on_forward=slow_down()) as engine:

        async def use(client: Client) -> None:
            work = asyncio.ensure_future(client.post(CHAT, chat_body(stream=stream, n=5, max_tokens=900)))
            await wait_until(lambda: engine.get_stats()["total_tokens"] >= 15)
            work.cancel()
            await wait_until(lambda: not engine.get_stats()["active_tasks"])
            assert engine.get_stats()["finished"]["cancelled"] == 5
            assert engine.get_stats()["pages_used"] == 0

        ask(engine, use)


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_ends_all_choices(stream: bool) -> None:
    with run_engine(on_forward=slow_down()) as engine:

        async def use(client: Client) -> Answer:
            headers = {"Connection": "close"}
            return await client.post(CHAT, make_body(stream=stream, n=3, max_tokens=900), headers)

        answer = ask(engine, use, build_settings(request_timeout_s=0.3))
        assert engine.drain(10)
        assert engine.get_stats()["finished"]["cancelled"] == 3
    error = json.loads(answer.frames[-1].removeprefix("data: ")) if stream else answer.json
    assert error["error"]["code"] == "request_timeout"
    assert answer.status == (200 if stream else 504)


def test_choices_are_admitted_all_or_none() -> None:
    gate = threading.Event()

    def hold(_: list[Context]) -> None:
        assert gate.wait(10)

    with run_engine(answer_script({END: "ok"}), on_forward=hold, max_batch_size=1, max_queue=4) as engine:

        async def use(client: Client) -> None:
            running = asyncio.ensure_future(client.chat(temperature=0))
            await wait_until(lambda: engine.get_stats()["active_tasks"] == 1)
            waiting = asyncio.ensure_future(client.chat(temperature=0, n=2))
            await wait_until(lambda: engine.get_stats()["waiting_queue"] == 2)
            refused = await client.chat(temperature=0, n=3)
            assert (refused.status, refused.json["error"]["code"]) == (429, "queue_full")
            assert engine.get_stats()["waiting_queue"] == 2
            gate.set()
            assert [reading.text for reading in read(await waiting)] == ["ok", "ok"]
            assert read_one(await running).text == "ok"

        ask(engine, use)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_more_choices_than_can_ever_wait_are_the_mistake_of_the_client(path: str) -> None:
    fields: dict[str, Any] = {"prompt": ["a", "b"], "n": 3} if path == COMPLETIONS else {"n": 5}
    with run_engine(max_queue=4) as engine:
        answer = send(engine, path, **fields)
    assert answer.status == 422
    assert "4" in answer.json["error"]["message"]


def test_many_clients_with_several_choices_get_what_they_get_alone() -> None:
    bodies = [
        make_body(content="x" * (9 * i + 1), n=1 + i % 4, seed=i, stream=i % 2 == 0, **SAMPLED)
        for i in range(12)
    ]

    async def use(client: Client) -> None:
        together = await asyncio.gather(*(client.post(CHAT, body) for body in bodies))
        alone = [await client.post(CHAT, body) for body in bodies]
        assert [read(answer) for answer in together] == [read(answer) for answer in alone]

    with run_engine(spread=9.0, n_tokens=1024) as engine:
        ask(engine, use)


def test_a_choice_that_ends_early_leaves_the_others_going() -> None:
    """With one call allowed, a choice is complete at its call, whatever comes after it."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    def script(context: Context) -> int:
        said = answer_of(context) or b"a"
        if said[0] > ord("d"):
            return ord("w")
        return call.encode()[len(said) - 1] if len(said) <= len(call) else ord("z")

    fields = FORKED | {"tools": [{"type": "function", "function": {"name": "f"}}], "max_tokens": 200}
    with run_engine(script, kind=ForkModel) as engine:
        whole = read(chat(engine, parallel_tool_calls=False, **fields))
        assert read(chat(engine, parallel_tool_calls=False, stream=True, **fields)) == whole
    assert {reading.reason for reading in whole} == {"tool_calls", "length"}
    for reading in whole:
        has_call = reading.text[0] in "abcd"
        assert reading.calls == ((("f", {}),) if has_call else ())
        assert (reading.reason == "tool_calls") == has_call
        assert len(reading.text) == (1 if has_call else 200)


# The official client


def test_the_official_client_reads_several_choices() -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with run_engine(answer_script({END: "a😀"})) as engine, connect_openai(engine) as client:
        whole = client.chat.completions.create(model="m", messages=messages, n=3, temperature=0)
        with client.chat.completions.stream(model="m", messages=messages, n=3, temperature=0) as stream:
            streamed = stream.get_final_completion()
    assert [choice.message.content for choice in whole.choices] == ["a😀"] * 3
    assert [choice.index for choice in streamed.choices] == [0, 1, 2]
    assert [choice.message.content for choice in streamed.choices] == ["a😀"] * 3
    assert {choice.finish_reason for choice in streamed.choices} == {"stop"}


def test_choices_of_an_engine_that_goes_away_are_one_error() -> None:
    engine = FakeEngine(["a", "b"])
    engine.is_held = True

    async def use(client: Client) -> Answer:
        work = asyncio.ensure_future(client.chat(n=3))
        await wait_until(lambda: len(engine.prompts) == 3)
        engine.is_alive = False
        return await work

    answer = ask(engine, use)
    assert (answer.status, answer.json["error"]["code"]) == (503, "engine_unavailable")


def test_a_slow_reader_of_several_choices_gets_everything() -> None:
    """The answers are larger than what a socket holds."""
    pieces = [f"{i:04}" * 5000 for i in range(60)]

    async def use(client: Client) -> bytes:
        data = b""
        async with client.session.post(client.url + CHAT, json=make_body(n=3, stream=True)) as response:
            async for part in response.content.iter_chunked(1 << 16):
                data += part
                await asyncio.sleep(0.002)
        return data

    answer = Answer(200, {"content-type": "text/event-stream"}, ask(FakeEngine(pieces), use))
    assert [reading.text for reading in read(answer)] == ["".join(pieces)] * 3
