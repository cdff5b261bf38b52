"""Answers of all routes as a client reads them, whole or as a stream; the rules of each are checked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import attrs
import jsonschema
import openai

from astrai_triton.engine import InferenceEngine
from fake_engine import Answer, Client, ask, build_settings, chat_body, serve_in_thread
from fakes import ByteTokenizer, Context, DistinctModel, ScriptedModel, hash_script

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
END = "<assistant>"
"""What the prompt of a conversation ends with."""


@contextmanager
def run_engine(
    script: Callable[[Context], int] = hash_script,
    *,
    kind: type[ScriptedModel] = ScriptedModel,
    **options: Any,
) -> Iterator[InferenceEngine]:
    """A running engine over the scripted model; no page is lost once it has been used.

    Args:
        kind: of the model.
        options: of the model (``on_forward``, ``spread``) and of the engine, ``tokenizer`` among them.
    """
    model = kind(script, on_forward=options.pop("on_forward", None), spread=options.pop("spread", 0.0))
    tokenizer = options.pop("tokenizer", None) or ByteTokenizer()
    sizes = {"max_batch_size": 16, "max_seq_len": 1024, "page_size": 4, "n_tokens": 8192} | options
    with InferenceEngine(model, tokenizer, **sizes) as engine:
        yield engine
        assert engine.drain(20)
        engine.pool.check()
        assert engine.get_stats()["pages_used"] == 0


@contextmanager
def run_wild() -> Iterator[InferenceEngine]:
    """An engine over a model that would say anything: random preferences, the end being one of them."""
    with run_engine(kind=DistinctModel, spread=30.0, max_seq_len=4096, max_step_tokens=4096) as engine:
        yield engine


def is_valid(value: Any, schema: Any) -> bool:
    """Whether a parsed JSON value is valid under a JSON Schema."""
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def shape(path: str, schema: Any) -> dict[str, Any]:
    """The field of a request that asks for an answer under ``schema``."""
    if path == CHAT:
        json_schema = {"name": "answer", "strict": True, "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": json_schema}}
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


@contextmanager
def connect_openai(engine: Any) -> Iterator[openai.OpenAI]:
    """The official client of a server over ``engine``."""
    with (
        serve_in_thread(engine, build_settings()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        yield client


@contextmanager
def connect_anthropic(engine: Any) -> Iterator[anthropic.Anthropic]:
    """The official client of a server over ``engine``."""
    with (
        serve_in_thread(engine, build_settings()) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as client,
    ):
        yield client


def send(engine: Any, path: str, **fields: Any) -> Answer:
    """One request to a server of its own."""

    async def use(client: Client) -> Answer:
        return await client.post(path, make_body(**fields))

    return ask(engine, use)


def send_all(engine: Any, path: str, *bodies: dict[str, Any]) -> list[Answer]:
    """Several requests to one server, one after the other."""

    async def use(client: Client) -> list[Answer]:
        return [await client.post(path, make_body(**body)) for body in bodies]

    return ask(engine, use)


def send_together(engine: Any, path: str, *bodies: dict[str, Any], **options: Any) -> list[Answer]:
    """Several requests to one server at once; ``options`` are settings of it."""

    async def use(client: Client) -> list[Answer]:
        return await asyncio.gather(*(client.post(path, make_body(**body)) for body in bodies))

    return ask(engine, use, build_settings(**options))


def make_body(**fields: Any) -> dict[str, Any]:
    """A greedy request; of one message where ``fields`` have neither messages nor a prompt."""
    fields = {"temperature": 0} | fields
    return fields if "prompt" in fields or "messages" in fields else chat_body(**fields)


@attrs.frozen(kw_only=True)
class Reading:
    """What a client has read of one choice."""

    text: str
    reason: str
    calls: tuple[tuple[str, Any], ...] = ()
    """Names and arguments."""
    stop: str | None = None
    """The stop sequence that matched, where the protocol tells it."""
    logprobs: Any = None
    """Of the whole choice, as the protocol writes them; a stream's are joined."""


def read(answer: Answer) -> list[Reading]:
    """All choices of an answer, by index."""
    assert answer.status == 200, answer.body
    if answer.headers["content-type"].startswith("text/event-stream"):
        return _read_frames(load_frames(answer))
    body = answer.json
    if body.get("type") == "message":
        return [_read_message(body)]
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [_read_completion(c) if "text" in c else _read_chat(c) for c in choices]


def read_one(answer: Answer) -> Reading:
    """The only choice."""
    (reading,) = read(answer)
    return reading


def load_frames(answer: Answer) -> list[dict[str, Any]]:
    """Payloads of all frames of a stream that ended well."""
    assert answer.status == 200, answer.body
    *frames, last = answer.frames
    assert last == "data: [DONE]", last
    payloads = []
    for frame in frames:
        *names, data = frame.split("\n")
        payloads.append(json.loads(data.removeprefix("data: ")))
        assert names == ([f"event: {payloads[-1]['type']}"] if "type" in payloads[-1] else [])
    return payloads


def usage_of(answer: Answer) -> dict[str, Any]:
    """Of a whole answer, or of the frame of a stream that tells it."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return dict(answer.json["usage"])
    return dict(next(frame["usage"] for frame in reversed(load_frames(answer)) if frame.get("usage")))


def _read_chat(choice: dict[str, Any]) -> Reading:
    message = choice["message"]
    assert message["role"] == "assistant"
    calls = message.get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert message["content"] is not None or calls
    named = tuple((call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls)
    return Reading(
        text=message["content"] or "",
        reason=choice["finish_reason"],
        calls=named,
        logprobs=choice["logprobs"]["content"] if choice.get("logprobs") else None,
    )


def _read_completion(choice: dict[str, Any]) -> Reading:
    return Reading(text=choice["text"], reason=choice["finish_reason"], logprobs=choice["logprobs"])


def _read_message(body: dict[str, Any]) -> Reading:
    assert (body["type"], body["role"]) == ("message", "assistant")
    blocks = body["content"]
    assert {block["type"] for block in blocks} <= {"text", "tool_use"}
    return Reading(
        text="".join(block["text"] for block in blocks if block["type"] == "text"),
        reason=body["stop_reason"],
        calls=tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"),
        stop=body["stop_sequence"],
    )


def _read_frames(payloads: list[dict[str, Any]]) -> list[Reading]:
    if payloads[0].get("type") == "message_start":
        return [read_events(payloads)]
    heads = {tuple(payload[key] for key in ("id", "object", "created", "model")) for payload in payloads}
    assert len(heads) == 1
    reader = _ChunkReader()
    for payload in payloads:
        for choice in payload["choices"]:
            reader.take(choice, is_usage=payload.get("usage") is not None)
    return reader.finish()


class _ChunkReader:
    """Joins the chunks of each choice of a stream of either OpenAI route."""

    def __init__(self) -> None:
        self._choices: dict[int, _JoinedChoice] = {}

    def take(self, choice: dict[str, Any], *, is_usage: bool) -> None:
        if is_usage:
            # The frame of the usage only looks like a chunk: it says nothing of the choice.
            assert choice["finish_reason"] is None
            assert not choice.get("delta")
            assert not choice.get("text")
            return
        self._choices.setdefault(choice["index"], _JoinedChoice()).take(choice)

    def finish(self) -> list[Reading]:
        assert sorted(self._choices) == list(range(len(self._choices)))
        return [self._choices[index].finish() for index in sorted(self._choices)]


class _JoinedChoice:
    def __init__(self) -> None:
        self.text = ""
        self.reason: str | None = None
        self.names: list[str] = []
        self.arguments: list[str] = []
        self.logprobs: Any = None
        self.num_chunks = 0

    def take(self, choice: dict[str, Any]) -> None:
        assert self.reason is None, "a chunk comes after the one with the finish reason"
        self.reason = choice["finish_reason"]
        logprobs = choice.get("logprobs")
        if "delta" in choice:
            # The role comes once, first.
            assert ("role" in choice["delta"]) == (self.num_chunks == 0)
            self.text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                self._take_call(call)
            if logprobs is not None:
                self.logprobs = (self.logprobs or []) + logprobs["content"]
        else:
            self.text += choice["text"]
            if logprobs is not None:
                before = self.logprobs or {key: [] for key in logprobs}
                self.logprobs = {key: before[key] + logprobs[key] for key in logprobs}
        self.num_chunks += 1

    def _take_call(self, call: dict[str, Any]) -> None:
        if "id" in call:
            assert call["id"].startswith("call_")
            assert (call["index"], call["type"]) == (len(self.names), "function")
            self.names.append(call["function"]["name"])
            self.arguments.append("")
        # Calls come one after the other, none is taken up again.
        assert call["index"] == len(self.names) - 1
        self.arguments[-1] += call["function"]["arguments"]

    def finish(self) -> Reading:
        assert self.reason is not None
        calls = tuple((name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True))
        return Reading(text=self.text, reason=self.reason, calls=calls, logprobs=self.logprobs)


def read_events(payloads: list[dict[str, Any]]) -> Reading:
    """The message that a stream of events makes."""
    blocks, delta = join_blocks(payloads)
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("json"))
    message = {"type": "message", "role": "assistant", "content": blocks, **delta}
    return _read_message(message)


def join_blocks(payloads: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Content blocks, those of tools with their JSON text, and the last delta of the message."""
    start, *middle, delta, stop = payloads
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    blocks: list[dict[str, Any]] = []
    is_open = False
    for payload in middle:
        kind = payload["type"]
        assert payload["index"] == len(blocks) - (kind != "content_block_start")
        assert is_open == (kind != "content_block_start")
        is_open = kind != "content_block_stop"
        if kind == "content_block_start":
            block = dict(payload["content_block"])
            assert (block["text"] == "") if block["type"] == "text" else (block["input"] == {})
            blocks.append(block if block["type"] == "text" else block | {"json": ""})
        elif kind == "content_block_delta":
            part, block = payload["delta"], blocks[-1]
            key, name = ("text", "text_delta") if block["type"] == "text" else ("json", "input_json_delta")
            assert part["type"] == name
            block[key] += part["text" if key == "text" else "partial_json"]
        else:
            assert kind == "content_block_stop"
    assert blocks
    assert not is_open
    return blocks, delta["delta"]
