"""The official SDKs against a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pytest

from astrai_server.keys import load_keys
from astrai_triton.errors import EngineUnavailableError, QueueFullError
from fake_engine import FakeEngine, build_settings, serve_in_thread

MESSAGES: Any = [{"role": "user", "content": "hi"}]
PIECES = [" Hé", "", "llo 😀", "\n"]
TEXT = "".join(PIECES)


@contextmanager
def connect_openai(engine: FakeEngine, **options: Any) -> Iterator[openai.OpenAI]:
    with (
        serve_in_thread(engine, build_settings(**options)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client,
    ):
        yield client


@contextmanager
def connect_anthropic(engine: FakeEngine, **options: Any) -> Iterator[anthropic.Anthropic]:
    with (
        serve_in_thread(engine, build_settings(**options)) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=10) as client,
    ):
        yield client


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# OpenAI


def test_openai_whole() -> None:
    with connect_openai(FakeEngine(PIECES, cached_tokens=16)) as client:
        answer = client.chat.completions.create(model="m", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "m"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (19, 4)
    assert answer.usage.total_tokens == 23
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert answer._request_id is not None


@pytest.mark.parametrize(
    ("usage_frame", "options"),
    [
        ("compat", None),
        ("openai", None),
        ("compat", {"include_usage": False}),
        ("openai", {"include_usage": False}),
        ("seed", {"include_usage": False}),
    ],
)
def test_the_naive_openai_loop_survives(usage_frame: str, options: Any) -> None:
    fields = {} if options is None else {"stream_options": options}
    with connect_openai(FakeEngine(PIECES), usage_frame=usage_frame) as client:
        stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True, **fields)
        text = ""
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == TEXT


def test_the_finish_reason_of_an_openai_stream_comes_once() -> None:
    with connect_openai(FakeEngine(PIECES, finish="length")) as client:
        stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
    assert [reason for reason in reasons if reason is not None] == ["length"]


@pytest.mark.parametrize("usage_frame", ["compat", "openai", "seed"])
def test_an_openai_stream_with_usage_ends_with_it(usage_frame: str) -> None:
    with connect_openai(FakeEngine(PIECES, cached_tokens=16), usage_frame=usage_frame) as client:
        chunks = list(
            client.chat.completions.create(
                model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
        )
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (19, 4)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 16


def test_a_compat_stream_carries_its_usage_unasked() -> None:
    with connect_openai(FakeEngine(PIECES)) as client:
        chunks = list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None] == [4]


def test_the_stream_helper_of_openai_collects_the_answer() -> None:
    with (
        connect_openai(FakeEngine(PIECES)) as client,
        client.chat.completions.stream(model="m", messages=MESSAGES) as stream,
    ):
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"


def test_openai_errors_are_mapped() -> None:
    with connect_openai(FakeEngine(max_seq_len=64)) as client:

        def create(**fields: Any) -> Any:
            return client.chat.completions.create(**({"model": "m", "messages": MESSAGES} | fields))

        with pytest.raises(openai.UnprocessableEntityError) as wrong:
            create(temperature=3)
        assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.BadRequestError) as unsupported:
            create(functions=[{"name": "f"}])
        assert (unsupported.value.param, unsupported.value.code) == ("functions", "unsupported")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens") as too_long:
            create(messages=[{"role": "user", "content": "x" * 64}])
        assert too_long.value.code == "context_length_exceeded"
        assert too_long.value.request_id == too_long.value.response.headers["x-request-id"]
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
        assert [model.id for model in client.models.list()] == ["astrai"]


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (QueueFullError(1, 2.0), openai.RateLimitError),
        (EngineUnavailableError("down"), openai.InternalServerError),
    ],
)
def test_openai_sees_a_busy_server(refusal: Exception, kind: type[openai.APIStatusError]) -> None:
    with connect_openai(FakeEngine(refuse=refusal)) as client, pytest.raises(kind) as caught:
        client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    assert int(caught.value.response.headers["retry-after"]) >= 2


def test_openai_raises_on_a_failure_in_mid_stream() -> None:
    with connect_openai(FakeEngine(["a"], finish="error", error=RuntimeError("x"))) as client:
        stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="internal error"):
            list(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_an_openai_client_that_leaves_cancels_its_task(stream: bool) -> None:
    engine = FakeEngine(["a", "b"])
    engine.is_held = True
    with connect_openai(engine) as client:
        if stream:
            chunks = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            next(iter(chunks))
            chunks.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.chat.completions.create(model="m", messages=MESSAGES, timeout=0.2)
        wait_until(lambda: engine.num_cancelled == 1)


# Anthropic


def test_anthropic_whole() -> None:
    engine = FakeEngine(PIECES, finish="stop", stop_string="END", cached_tokens=16)
    with connect_anthropic(engine) as client:
        message = client.messages.create(
            model="m", max_tokens=10, messages=MESSAGES, stop_sequences=["END"], system="s"
        )
    assert message.content[0].type == "text"
    assert message.content[0].text == TEXT
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (12, 16)
    assert message.usage.output_tokens == 4
    assert engine.prompts == ["<system>s<user>hi<assistant>"]
    assert message._request_id is not None


def test_an_anthropic_stream_collects_the_answer() -> None:
    engine = FakeEngine(PIECES, finish="length", cached_tokens=16)
    with (
        connect_anthropic(engine) as client,
        client.messages.stream(model="m", max_tokens=10, messages=MESSAGES) as stream,
    ):
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert pieces == [piece for piece in PIECES if piece]
    assert message.content[0].type == "text"
    assert message.content[0].text == TEXT
    assert message.stop_reason == "max_tokens"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (3, 16)
    assert message.usage.output_tokens == 4


def test_raw_anthropic_events_come_in_order() -> None:
    with connect_anthropic(FakeEngine(["a", "b"])) as client:
        events = client.messages.create(model="m", max_tokens=10, messages=MESSAGES, stream=True)
        types = [event.type for event in events]
    assert types == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_anthropic_errors_are_mapped() -> None:
    with connect_anthropic(FakeEngine(max_seq_len=64)) as client:

        def create(**fields: Any) -> Any:
            body = {"model": "m", "max_tokens": 10, "messages": MESSAGES}
            return client.messages.create(**(body | fields))

        with pytest.raises(anthropic.UnprocessableEntityError, match="max_tokens"):
            create(max_tokens=-1)
        with pytest.raises(anthropic.BadRequestError, match="container"):
            create(extra_body={"container": "c"})
        with pytest.raises(anthropic.BadRequestError, match="maximum context length is 64") as too_long:
            create(messages=[{"role": "user", "content": "x" * 64}])
        assert too_long.value.request_id == too_long.value.response.headers["request-id"]
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("other")
        assert [model.id for model in client.models.list()] == ["astrai"]


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (QueueFullError(1, 2.0), anthropic.RateLimitError),
        (EngineUnavailableError("down"), anthropic.InternalServerError),
    ],
)
def test_anthropic_sees_a_busy_server(refusal: Exception, kind: type[anthropic.APIStatusError]) -> None:
    with connect_anthropic(FakeEngine(refuse=refusal)) as client, pytest.raises(kind):
        client.messages.create(model="m", max_tokens=10, messages=MESSAGES, stream=True)


def test_anthropic_raises_on_a_failure_in_mid_stream() -> None:
    engine = FakeEngine(["a"], finish="error", error=RuntimeError("x"))
    with connect_anthropic(engine) as client:
        events = client.messages.create(model="m", max_tokens=10, messages=MESSAGES, stream=True)
        with pytest.raises(anthropic.APIError, match="internal error"):
            list(events)


def test_an_anthropic_client_that_leaves_cancels_its_task() -> None:
    engine = FakeEngine(["a", "b"])
    engine.is_held = True
    with connect_anthropic(engine) as client:
        events = client.messages.create(model="m", max_tokens=10, messages=MESSAGES, stream=True)
        next(iter(events))
        events.close()
        wait_until(lambda: engine.num_cancelled == 1)


# Both


def test_sixteen_clients_at_once_get_their_answers() -> None:
    engine = FakeEngine(PIECES, gap_s=0.001)
    answers: list[str | None] = []
    with connect_openai(engine) as client:

        def ask() -> None:
            stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            answers.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert answers == [TEXT] * 16


# API keys


def test_the_official_clients_send_their_key_and_know_a_refusal() -> None:
    secret = "alice-0123456789abcdef"
    keys = load_keys(build_settings(), {"ASTRAI_API_KEYS": f"alice: {secret}"})
    engine = FakeEngine(PIECES)
    with serve_in_thread(engine, keys=keys) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0, timeout=10) as client:
            assert client.chat.completions.create(model="m", messages=MESSAGES).choices[0].message.content
            with pytest.raises(openai.AuthenticationError, match="not known here"):
                client.with_options(api_key="wrong").models.list()
        for options in ({"api_key": secret}, {"auth_token": secret, "api_key": None}):
            with anthropic.Anthropic(base_url=url, max_retries=0, timeout=10, **options) as claude:  # type: ignore[arg-type]
                assert claude.messages.create(model="m", max_tokens=9, messages=MESSAGES).content
        with (
            anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0, timeout=10) as claude,
            pytest.raises(anthropic.AuthenticationError, match="not known here"),
        ):
            claude.messages.create(model="m", max_tokens=9, messages=MESSAGES)
    assert [key for key, _ in engine.owners] == ["alice"] * 3
