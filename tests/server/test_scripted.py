"""The whole stack but the weights: HTTP, engine, cache and sampler over the scripted model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from astrai_server.keys import load_keys
from astrai_triton.engine import InferenceEngine
from fake_engine import Answer, Client, ask, build_settings, chat_body
from fakes import EOS, ByteTokenizer, Context, ScriptedModel, answer_script, hash_script

ROUTES = ("/v1/chat/completions", "/v1/messages")
END = "<assistant>"


@contextmanager
def run_engine(script: Callable[[Context], int] = hash_script, **options: Any) -> Iterator[InferenceEngine]:
    """A running engine; no page is lost once it has been used."""
    model = ScriptedModel(
        script, on_forward=options.pop("on_forward", None), spread=options.pop("spread", 0.0)
    )
    sizes = {"max_batch_size": 8, "max_seq_len": 512, "page_size": 4, "n_tokens": 2048} | options
    with InferenceEngine(model, ByteTokenizer(), **sizes) as engine:
        yield engine
        assert engine.drain(10)
        engine.pool.check()
        assert engine.get_stats()["pages_used"] == 0


def say(text: str | bytes) -> Callable[[Context], int]:
    """Always answer with ``text``."""
    return answer_script({END: text})


def send(engine: InferenceEngine, path: str, **fields: Any) -> Answer:
    async def use(client: Client) -> Answer:
        return await client.post(path, chat_body(**({"temperature": 0} | fields)))

    return ask(engine, use)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def read_whole(answer: Answer) -> tuple[str, str, str | None]:
    """Text, finish reason and stop sequence of an answer of either protocol."""
    assert answer.status == 200, answer.body
    body = answer.json
    if "choices" in body:
        return body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"], None
    return body["content"][0]["text"], body["stop_reason"], body["stop_sequence"]


def read_stream(answer: Answer) -> tuple[str, str, str | None]:
    """The same of a stream."""
    assert answer.status == 200, answer.body
    assert answer.frames[-1] == "data: [DONE]"
    text, reason, stop = "", "", None
    for frame in answer.frames[:-1]:
        payload = json.loads(frame.splitlines()[-1].removeprefix("data: "))
        if payload.get("object") == "chat.completion.chunk":
            text += payload["choices"][0]["delta"].get("content", "")
            reason = payload["choices"][0]["finish_reason"] or reason
        elif payload["type"] == "content_block_delta":
            text += payload["delta"]["text"]
        elif payload["type"] == "message_delta":
            reason, stop = payload["delta"]["stop_reason"], payload["delta"]["stop_sequence"]
    return text, reason, stop


def read_both(engine: InferenceEngine, path: str, **fields: Any) -> tuple[str, str, str | None]:
    """The answer, which must be the same whole and streamed."""
    whole = read_whole(send(engine, path, **fields))
    assert read_stream(send(engine, path, stream=True, **fields)) == whole
    return whole


@pytest.mark.parametrize("path", ROUTES)
def test_the_end_of_the_turn_is_a_stop(path: str) -> None:
    with run_engine(say(" Hello")) as engine:
        text, reason, stop = read_both(engine, path)
    assert (text, stop) == (" Hello", None)
    assert reason in ("stop", "end_turn")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("max_tokens", "text"), [(0, ""), (1, "H"), (4, "Hell")])
def test_max_tokens_is_a_length(path: str, max_tokens: int, text: str) -> None:
    with run_engine(say("Hello")) as engine:
        answer, reason, _ = read_both(engine, path, max_tokens=max_tokens)
    assert answer == text
    assert reason in ("length", "max_tokens")


@pytest.mark.parametrize(
    ("stops", "text", "matched"),
    [
        (["llo w"], "He", "llo w"),
        (["zz", "o"], "Hell", "o"),
        (["world", "lo"], "Hel", "lo"),
        (["H"], "", "H"),
    ],
)
def test_stop_strings_cut_before_the_earliest(stops: list[str], text: str, matched: str) -> None:
    with run_engine(say("Hello world")) as engine:
        assert read_both(engine, ROUTES[0], stop=stops)[:2] == (text, "stop")
        assert read_both(engine, ROUTES[1], stop_sequences=stops) == (text, "stop_sequence", matched)


def test_what_only_begins_like_a_stop_string_is_given_out() -> None:
    with run_engine(say("Hello wor")) as engine:
        assert read_both(engine, ROUTES[0], stop="world")[0] == "Hello wor"


@pytest.mark.parametrize("path", ROUTES)
def test_characters_of_several_tokens_arrive_whole(path: str) -> None:
    with run_engine(say("a😀é")) as engine:
        assert read_both(engine, path)[0] == "a😀é"
        assert read_both(engine, path, max_tokens=3)[0] == "a\ufffd"


@pytest.mark.parametrize("path", ROUTES)
def test_usage_counts_sampled_tokens_and_a_second_prompt_is_cached(path: str) -> None:
    with run_engine(say("Hello")) as engine:
        first, second = (send(engine, path, content="x" * 40) for _ in range(2))
    assert read_whole(first) == read_whole(second)
    prompt_len = len("<user>" + "x" * 40 + END)
    if path == ROUTES[0]:
        assert first.json["usage"]["completion_tokens"] == 6
        assert first.json["usage"]["prompt_tokens"] == prompt_len
        cached = [
            answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)
        ]
    else:
        assert first.json["usage"]["output_tokens"] == 6
        assert (
            second.json["usage"]["input_tokens"] + second.json["usage"]["cache_read_input_tokens"]
            == prompt_len
        )
        cached = [answer.json["usage"]["cache_read_input_tokens"] for answer in (first, second)]
    assert cached[0] == 0
    assert cached[1] > 40


def test_a_stream_of_the_messages_api_starts_with_its_cached_tokens() -> None:
    with run_engine(say("Hello")) as engine:
        answers = [send(engine, ROUTES[1], content="x" * 40, stream=True) for _ in range(2)]
    starts = [json.loads(answer.frames[0].splitlines()[1].removeprefix("data: ")) for answer in answers]
    cached = [start["message"]["usage"]["cache_read_input_tokens"] for start in starts]
    assert cached[0] == 0
    assert cached[1] > 40


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_one_token_over_the_context_is_refused(path: str, stream: bool) -> None:
    frame = len("<user>" + END)
    with run_engine(max_seq_len=64) as engine:
        fits = send(engine, path, content="x" * (63 - frame), stream=stream)
        assert fits.status == 200
        answer = send(engine, path, content="x" * (64 - frame), stream=stream)
    assert answer.status == 400
    assert answer.json["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 64 tokens" in answer.json["error"]["message"]


def test_a_prompt_over_the_pool_is_refused_and_a_short_one_served() -> None:
    with run_engine(say("ok"), max_seq_len=512, n_tokens=64) as engine:
        answer = send(engine, ROUTES[0], content="x" * 100)
        assert (answer.status, answer.json["error"]["code"]) == (400, "kv_pool_exceeded")
        assert read_whole(send(engine, ROUTES[0]))[0] == "ok"


@pytest.mark.parametrize("path", ROUTES)
def test_huge_limits_are_clamped(path: str) -> None:
    with run_engine(max_seq_len=64) as engine:
        answer = send(engine, path, max_tokens=10**18, top_k=10**18)
    assert read_whole(answer)[1] in ("length", "max_tokens")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_pages_back(path: str, stream: bool) -> None:
    slow = threading.Event()

    def wait(_: list[Context]) -> None:
        slow.wait(0.005)

    with run_engine(on_forward=wait) as engine:

        async def use(client: Client) -> None:
            work = asyncio.ensure_future(client.post(path, chat_body(stream=stream, max_tokens=400)))
            async with asyncio.timeout(10):
                while engine.get_stats()["total_tokens"] < 3:
                    await asyncio.sleep(0.005)
                work.cancel()
                while engine.get_stats()["active_tasks"]:
                    await asyncio.sleep(0.005)
            assert engine.get_stats()["total_tokens"] < 390
            assert engine.get_stats()["pages_used"] == 0

        ask(engine, use)


@pytest.mark.parametrize("path", ROUTES)
def test_a_fault_of_the_model_ends_that_request_only(path: str) -> None:
    def fail(contexts: list[Context]) -> None:
        if any(b"boom" in bytes(token for token in context if token < EOS) for context in contexts):
            raise RuntimeError("secret")

    with run_engine(say("fine"), on_forward=fail) as engine:

        async def use(client: Client) -> None:
            bad, good = await asyncio.gather(
                client.post(path, chat_body("boom")), client.post(path, chat_body("hi", temperature=0))
            )
            assert bad.status == 500
            assert b"secret" not in bad.body
            assert read_whole(good)[0] == "fine"
            assert (await client.send("GET", "/health")).status == 200

        ask(engine, use)


def test_a_full_queue_is_a_429_with_a_time() -> None:
    gate = threading.Event()

    def hold(_: list[Context]) -> None:
        assert gate.wait(10)

    with run_engine(say("ok"), on_forward=hold, max_batch_size=1, max_queue=1) as engine:

        async def use(client: Client) -> None:
            running = asyncio.ensure_future(client.chat(temperature=0))
            while not engine.get_stats()["active_tasks"]:
                await asyncio.sleep(0.01)
            waiting = asyncio.ensure_future(client.chat(temperature=0))
            while not engine.get_stats()["waiting_queue"]:
                await asyncio.sleep(0.01)
            refused = await client.chat(temperature=0)
            assert (refused.status, refused.json["error"]["type"]) == (429, "rate_limit_error")
            assert int(refused.headers["retry-after"]) >= 1
            gate.set()
            for answer in await asyncio.gather(running, waiting):
                assert read_whole(answer)[0] == "ok"

        ask(engine, use)


@pytest.mark.parametrize("fields", [{"seed": 7}, {"seed": 7, "temperature": 2}, {"seed": 0, "top_k": 1}])
def test_the_same_seed_gives_the_same_text(fields: dict[str, Any]) -> None:
    with run_engine(spread=12.0) as engine:
        texts = {
            read_both(engine, ROUTES[0], **({"temperature": 1, "max_tokens": 24} | fields))[0]
            for _ in range(2)
        }
    assert len(texts) == 1


def test_penalties_and_bias_act() -> None:
    def repeat(_: Context) -> int:
        return ord("a")

    with run_engine(repeat, spread=1.0) as engine:
        assert read_both(engine, ROUTES[0], max_tokens=8)[0] == "a" * 8
        text = read_both(engine, ROUTES[0], max_tokens=32, frequency_penalty=2)[0]
        assert text.count("a") < 8
        biased = read_both(engine, ROUTES[0], max_tokens=8, logit_bias={str(ord("a")): -100})[0]
        assert "a" not in biased
        favoured = read_both(engine, ROUTES[0], max_tokens=4, logit_bias={str(ord("z")): 100})[0]
        assert favoured == "zzzz"


def test_sixteen_clients_of_both_protocols_get_what_they_get_alone() -> None:
    requests = [
        (ROUTES[i % 2], chat_body("x" * (7 * i + 1), max_tokens=10 + i, temperature=0, stream=i % 3 == 0))
        for i in range(16)
    ]

    def read(answer: Answer) -> tuple[str, str, str | None]:
        is_stream = answer.headers["content-type"].startswith("text/event-stream")
        return read_stream(answer) if is_stream else read_whole(answer)

    with run_engine() as engine:

        async def use(client: Client) -> None:
            together = await asyncio.gather(*(client.post(path, body) for path, body in requests))
            alone = [await client.post(path, body) for path, body in requests]
            assert [read(answer) for answer in together] == [read(answer) for answer in alone]

        ask(engine, use)


def test_stats_keep_the_old_keys_and_count_what_happens() -> None:
    with run_engine(say("ok")) as engine:

        async def use(client: Client) -> dict[str, Any]:
            for _ in range(2):
                assert (await client.chat("x" * 40, temperature=0)).status == 200
            assert (await client.chat(temperature=0, max_tokens=1)).status == 200
            # A client has its answer before the step that made it is over.
            await wait_until(lambda: not engine.get_stats()["active_tasks"])
            return dict((await client.send("GET", "/stats")).json)

        stats = ask(engine, use)
    assert (stats["total_tasks"], stats["total_tokens"]) == (3, 3 + 3 + 1)
    assert (stats["active_tasks"], stats["waiting_queue"]) == (0, 0)
    assert stats["pages_free"] + stats["pages_used"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["finished"] == {"stop": 2, "length": 1, "cancelled": 0, "error": 0}
    assert 0 < stats["cache_hit_rate"] < 1
    assert stats["step_us"] > 0
    assert stats["queue_wait_ms"] >= 0
    assert (stats["preemptions"], stats["recomputed_tokens"], stats["evicted_pages"]) == (0, 0, 0)
    assert stats["tokens_by_key"] == {}


def test_stats_count_tokens_by_the_names_of_keys() -> None:
    secret = "alice-0123456789abcdef"
    keys = load_keys(build_settings(), {"ASTRAI_API_KEYS": f"alice: {secret}, bob: bob-0123456789abcdef"})
    headers = {"Authorization": f"Bearer {secret}"}

    async def use(client: Client) -> Answer:
        answer = await client.post(ROUTES[0], chat_body(temperature=0), headers)
        assert answer.status == 200
        await wait_until(lambda: engine.get_stats()["tokens_by_key"] == served)
        return await client.send("GET", "/stats", headers=headers)

    # "ok" and the end of the turn, after a prompt of which nothing was cached.
    served = {"alice": len("<user>hi<assistant>") + 3}
    with run_engine(say("ok")) as engine:
        answer = ask(engine, use, keys=keys)
    assert answer.json["tokens_by_key"] == served
    assert secret.encode() not in answer.body


def test_isolated_keys_share_no_prefix() -> None:
    settings = build_settings(isolate=True)
    secrets = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob")}
    keys = load_keys(settings, {"ASTRAI_API_KEYS": ",".join(f"{name}: {secrets[name]}" for name in secrets)})

    async def cached(client: Client, name: str) -> int:
        answer = await client.post(
            ROUTES[0], chat_body("x" * 40, temperature=0), {"x-api-key": secrets[name]}
        )
        return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def use(client: Client) -> list[int]:
        return [await cached(client, name) for name in ("alice", "bob", "alice", "bob")]

    with run_engine(say("ok")) as engine:
        first, other, again, other_again = ask(engine, use, settings, keys)
    assert (first, other) == (0, 0)
    assert again == other_again > 0
