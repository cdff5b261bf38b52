"""What a load says to a server and what it reads in the answer, in the protocols people serve."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from astrai_bench.errors import BenchError
from astrai_bench.prompts import Prompt


@attrs.define(kw_only=True)
class Answer:
    """One request, as far as it went. Times are seconds of ``time.perf_counter``."""

    sent_s: float
    chunks_s: list[float] = attrs.field(factory=list)
    """Arrival of every chunk with text."""
    done_s: float | None = None
    """Arrival of the end of the stream."""
    input_tokens: int | None = None
    """As the server counts, cached ones included."""
    cached_tokens: int = 0
    """Of the input, found in a cache of the server."""
    output_tokens: int | None = None
    """As the server counts."""
    max_tokens: int = 0
    """Asked for."""
    error: str | None = None
    """Kind of failure, short and without details, so that failures can be counted."""
    detail: str = ""
    """What the server or the socket said."""

    @property
    def num_tokens(self) -> int:
        """Output tokens: the server's count, else a token for each chunk."""
        return len(self.chunks_s) if self.output_tokens is None else self.output_tokens

    def fail(self, kind: str, detail: object = "") -> None:
        """Note the first failure."""
        if self.error is None:
            self.error, self.detail = kind, " ".join(str(detail).split())[:300]


@attrs.frozen(kw_only=True)
class Question:
    """What is the same in every request of a load."""

    model: str
    max_tokens: int
    temperature: float
    ignore_eos: bool


@attrs.frozen(kw_only=True)
class Protocol:
    """How to ask for a stream, and how to read it."""

    name: str
    path: str
    build: Callable[[Question, Prompt], dict[str, Any]]
    read: Callable[[Answer, bytes, float], bool]
    """Note one event's data that arrived at a time; whether it was the last."""
    headers: Callable[[str | None], dict[str, str]]
    knows_ignore_eos: bool


def find_protocol(name: str) -> Protocol:
    """The protocol of that name.

    Raises:
        BenchError: there is none.
    """
    if name not in PROTOCOLS:
        raise BenchError(f"--protocol: wanted one of {', '.join(PROTOCOLS)}, got {name!r}")
    return PROTOCOLS[name]


class EventReader:
    """Cuts a stream of server-sent events, however its bytes are torn, into the data of each event."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> Iterator[bytes]:
        """Data of the events that end in ``data``; those without any are left out."""
        data = self._rest + data
        if b"\r" in data:
            # A lone CR at the end may be the first half of a line end.
            held, data = (data[-1:], data[:-1]) if data.endswith(b"\r") else (b"", data)
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            lines = event.split(b"\n") if b"\n" in event else (event,)
            content = b"\n".join(line[5:].lstrip() for line in lines if line.startswith(b"data:"))
            if content:
                yield content


def _parse(answer: Answer, data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except ValueError:
        answer.fail("malformed event", data[:200])
        return None
    if not isinstance(value, dict):
        answer.fail("malformed event", data[:200])
        return None
    if value.get("error") or value.get("type") == "error":
        answer.fail("error event", value.get("error") or value)
    return value


def _note_openai_usage(answer: Answer, usage: object) -> None:
    if isinstance(usage, Mapping):
        answer.input_tokens = _read_count(usage, "prompt_tokens", answer.input_tokens)
        answer.output_tokens = _read_count(usage, "completion_tokens", answer.output_tokens)
        answer.cached_tokens = _read_count(usage.get("prompt_tokens_details") or {}, "cached_tokens", 0) or 0


def _note_anthropic_usage(answer: Answer, usage: object, *, is_final: bool) -> None:
    if not isinstance(usage, Mapping):
        return
    counted = _read_count(usage, "input_tokens", None)
    if counted is not None:
        # Tokens in the cache are not in it.
        answer.cached_tokens = _read_count(usage, "cache_read_input_tokens", 0) or 0
        created = _read_count(usage, "cache_creation_input_tokens", 0) or 0
        answer.input_tokens = counted + answer.cached_tokens + created
    if is_final:
        answer.output_tokens = _read_count(usage, "output_tokens", answer.output_tokens)


def _read_count(usage: Mapping[str, Any], name: str, default: int | None) -> int | None:
    count = usage.get(name)
    return count if isinstance(count, int) else default


def _read_openai(answer: Answer, data: bytes, now: float) -> bool:
    if data == b"[DONE]":
        return True
    value = _parse(answer, data)
    if value is None:
        return False
    for choice in value.get("choices") or ():
        delta = choice.get("delta") or choice
        if delta.get("content") or delta.get("text") or delta.get("reasoning_content"):
            answer.chunks_s.append(now)
    if value.get("usage"):
        _note_openai_usage(answer, value["usage"])
    return False


def _read_anthropic(answer: Answer, data: bytes, now: float) -> bool:
    if data == b"[DONE]":
        # Servers of both protocols may end every stream like this.
        return False
    value = _parse(answer, data)
    if value is None:
        return False
    kind = value.get("type")
    if kind == "content_block_delta":
        delta = value.get("delta") or {}
        if delta.get("text") or delta.get("thinking") or delta.get("partial_json"):
            answer.chunks_s.append(now)
    elif kind == "message_start":
        # Its count of output tokens is of the moment.
        _note_anthropic_usage(answer, (value.get("message") or {}).get("usage"), is_final=False)
    elif kind == "message_delta":
        _note_anthropic_usage(answer, value.get("usage"), is_final=True)
    return kind == "message_stop"


def _sampling(question: Question, prompt: Prompt) -> dict[str, Any]:
    return {
        "model": question.model,
        "max_tokens": prompt.max_tokens or question.max_tokens,
        "temperature": question.temperature,
        "stream": True,
    }


def _openai_options(question: Question) -> dict[str, Any]:
    eos = {"ignore_eos": True} if question.ignore_eos else {}
    return {"stream_options": {"include_usage": True}, **eos}


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    return list(prompt.messages or ({"role": "user", "content": prompt.text or ""},))


def _build_chat(question: Question, prompt: Prompt) -> dict[str, Any]:
    return {**_sampling(question, prompt), **_openai_options(question), "messages": _messages(prompt)}


def _build_completion(question: Question, prompt: Prompt) -> dict[str, Any]:
    if prompt.text is None:
        raise BenchError("--protocol completions: wanted prompts, got messages; use --protocol chat")
    return {**_sampling(question, prompt), **_openai_options(question), "prompt": prompt.text}


def _build_anthropic(question: Question, prompt: Prompt) -> dict[str, Any]:
    messages = _messages(prompt)
    system = "\n".join(str(message.get("content")) for message in messages if message.get("role") == "system")
    body = {
        **_sampling(question, prompt),
        "messages": [message for message in messages if message.get("role") != "system"],
    }
    return body | {"system": system} if system else body


def _openai_headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _anthropic_headers(api_key: str | None) -> dict[str, str]:
    return {"anthropic-version": "2023-06-01", **({"x-api-key": api_key} if api_key else {})}


PROTOCOLS: Mapping[str, Protocol] = {
    "chat": Protocol(
        name="chat",
        path="/v1/chat/completions",
        build=_build_chat,
        read=_read_openai,
        headers=_openai_headers,
        knows_ignore_eos=True,
    ),
    "completions": Protocol(
        name="completions",
        path="/v1/completions",
        build=_build_completion,
        read=_read_openai,
        headers=_openai_headers,
        knows_ignore_eos=True,
    ),
    "anthropic": Protocol(
        name="anthropic",
        path="/v1/messages",
        build=_build_anthropic,
        read=_read_anthropic,
        headers=_anthropic_headers,
        knows_ignore_eos=False,
    ),
}
"""OpenAI's two, and Anthropic's."""
