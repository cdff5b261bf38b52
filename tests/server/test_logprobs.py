"""Log-probabilities of chat completions over the scripted model, whose tokens are bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from answers import (
    CHAT,
    END,
    connect_openai,
    load_frames,
    read,
    read_one,
    run_engine,
    send,
    send_all,
)
from fake_engine import Answer
from fakes import EOS, Context, DistinctModel, answer_script

TOOLS: list[Any] = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def say(text: str | bytes) -> Any:
    """Always answer with ``text``."""
    return answer_script({END: text})


def chat(engine: Any, **fields: Any) -> Answer:
    return send(engine, CHAT, logprobs=True, **fields)


def ask_all(engine: Any, *bodies: dict[str, Any]) -> list[Answer]:
    return send_all(engine, CHAT, *({"logprobs": True} | body for body in bodies))


def bytes_of(entries: list[dict[str, Any]]) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in entries)


def check_entries(entries: list[dict[str, Any]], num_top: int) -> None:
    for entry in entries:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        top = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        assert len(top) == num_top
        assert top == sorted(top, reverse=True)
        assert all(math.isfinite(value) and value <= 0 for value in (entry["logprob"], *top))
        assert all(
            alternative.keys() == {"token", "logprob", "bytes"} for alternative in entry["top_logprobs"]
        )
        assert not top or entry["logprob"] <= top[0]
        same = [a["logprob"] for a in entry["top_logprobs"] if a["bytes"] == entry["bytes"]]
        assert same in ([], [entry["logprob"]])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_every_token_has_an_entry(num_top: int, stream: bool) -> None:
    fields = {"temperature": 1.5, "seed": 5, "top_k": 0, "max_tokens": 32}
    with run_engine(spread=7.0) as engine:
        reading = read_one(chat(engine, top_logprobs=num_top, stream=stream, **fields))
    assert len(reading.logprobs) == len(reading.text) == 32
    assert bytes_of(reading.logprobs) == reading.text.encode()
    check_entries(reading.logprobs, num_top)


def test_a_greedy_token_is_the_first_alternative() -> None:
    with run_engine(spread=7.0) as engine:
        entries = read_one(chat(engine, top_logprobs=3, max_tokens=20)).logprobs
    assert len(entries) == 20
    for entry in entries:
        assert {key: entry[key] for key in ("token", "logprob", "bytes")} == entry["top_logprobs"][0]


def test_log_probabilities_are_those_of_the_model_whatever_the_sampler_does() -> None:
    # At a temperature of 0.5, with bias and penalties, the distribution that is drawn from is another one.
    wild = {"temperature": 0.5, "logit_bias": {"97": 50}, "frequency_penalty": 2, "max_tokens": 1}
    with run_engine(say("b"), spread=7.0) as engine:
        plain, biased = (read_one(answer).logprobs[0] for answer in ask_all(engine, {"max_tokens": 1}, wild))
    assert biased["token"] == "a"
    assert biased["logprob"] < plain["logprob"] < 0


def test_without_the_wish_there_are_none() -> None:
    with run_engine(say("Hello")) as engine:
        whole, streamed = ask_all(engine, {"logprobs": False}, {"logprobs": False, "stream": True})
    assert whole.json["choices"][0].get("logprobs") is None
    assert all(frame["choices"][0].get("logprobs") is None for frame in load_frames(streamed))


def test_a_whole_choice_object() -> None:
    with run_engine(say("A")) as engine:
        choice = chat(engine).json["choices"][0]
    (entry,) = choice["logprobs"]["content"]
    assert choice["logprobs"] == {"content": [entry], "refusal": None}
    assert entry == {"token": "A", "logprob": entry["logprob"], "bytes": [65], "top_logprobs": []}


@pytest.mark.parametrize("top_logprobs", [0, 2])
@pytest.mark.parametrize(
    "fields",
    [{}, {"stop": "world"}, {"stop": ["lo w", "xyz"]}, {"max_tokens": 7}, {"stop": "😀 b"}, {"n": 2}],
)
def test_a_stream_joined_is_the_whole_answer(fields: dict[str, Any], top_logprobs: int) -> None:
    body = {"top_logprobs": top_logprobs, **fields}
    with run_engine(say("Hello worl 😀 but")) as engine:
        whole, streamed = ask_all(engine, body, body | {"stream": True})
    assert read(streamed) == read(whole)


@pytest.mark.parametrize("text", ["a😀b", "😀", "é", "日本語 text", "👩‍👩‍👧"])
def test_the_bytes_of_a_character_of_several_tokens_give_it_again(text: str) -> None:
    with run_engine(say(text)) as engine:
        whole, streamed = ask_all(engine, {}, {"stream": True})
    reading = read_one(whole)
    assert read_one(streamed) == reading
    assert reading.text == bytes_of(reading.logprobs).decode() == text
    assert len(reading.logprobs) == len(text.encode())


def test_a_character_that_breaks_off_keeps_the_entries_of_its_bytes() -> None:
    with run_engine(say("a😀")) as engine:
        whole, streamed = ask_all(engine, {"max_tokens": 3}, {"max_tokens": 3, "stream": True})
    reading = read_one(whole)
    assert read_one(streamed) == reading
    assert reading.text == "a\ufffd"
    assert bytes_of(reading.logprobs) == "a😀".encode()[:3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [("llo w", "He"), (["zz", "o"], "Hell"), ("H", ""), ("wow", "Hello world 😀"), ("😀", "Hello world ")],
)
def test_entries_end_where_a_stop_string_cuts_the_text(stop: Any, text: str, stream: bool) -> None:
    with run_engine(say("Hello world 😀")) as engine:
        reading = read_one(chat(engine, stop=stop, stream=stream))
    assert reading.text == text
    assert bytes_of(reading.logprobs or []) == text.encode()


@pytest.mark.parametrize("stop", [None, "world", "lo worlds", "😀x"])
def test_the_entries_of_a_chunk_are_those_of_its_text(stop: str | None) -> None:
    with run_engine(say("Hello world, é 😀y and no end")) as engine:
        frames = load_frames(chat(engine, stop=stop, stream=True))
    text, data = "", b""
    for frame in frames[:-1]:
        choice = frame["choices"][0]
        text += choice["delta"].get("content", "")
        data += bytes_of((choice.get("logprobs") or {"content": []})["content"])
        assert data == text.encode()
    assert text


def test_impossible_tokens_have_finite_log_probabilities() -> None:
    class CertainModel(DistinctModel):
        def logits_after(self, context: Context) -> torch.Tensor:
            logits = torch.full((self.config.vocab_size,), -math.inf)
            logits[self.script(context)] = 1.0
            return logits

    with run_engine(say("ab"), kind=CertainModel) as engine:
        entries = read_one(chat(engine, top_logprobs=3)).logprobs
    assert [entry["logprob"] for entry in entries] == [0.0, 0.0]
    assert {a["logprob"] for entry in entries for a in entry["top_logprobs"][1:]} == {-9999.0}


def test_a_special_token_that_is_sampled_is_named() -> None:
    def script(context: Context) -> int:
        return EOS if context[-1] == ord("a") else ord("a")

    with run_engine(script) as engine:
        entries = read_one(chat(engine, ignore_eos=True, max_tokens=3)).logprobs
    assert [entry["token"] for entry in entries[:3:2]] == ["a", "a"]
    assert entries[1]["bytes"] == list(entries[1]["token"].encode())


def test_each_choice_has_its_own_entries() -> None:
    fields = {"n": 2, "temperature": 1.5, "seed": 1, "top_k": 0, "max_tokens": 12, "top_logprobs": 2}
    with run_engine(spread=9.0) as engine:
        whole, streamed = ask_all(engine, fields, fields | {"stream": True})
    readings = read(whole)
    assert read(streamed) == readings
    assert readings[0].text != readings[1].text
    for reading in readings:
        assert bytes_of(reading.logprobs) == reading.text.encode()
        check_entries(reading.logprobs, 2)


# With tools


@pytest.mark.parametrize(
    "text", ["Hello", f"Hello {CALL}", f"{CALL} x", CALL, f"a <tool {CALL}b", "<tool_call>"]
)
def test_with_tools_a_stream_joined_is_the_whole_answer(text: str) -> None:
    body = {"tools": TOOLS, "top_logprobs": 1}
    with run_engine(say(text)) as engine:
        whole, streamed = ask_all(engine, body, body | {"stream": True})
    reading = read_one(whole)
    assert read_one(streamed) == reading
    assert reading.calls == ((("f", {"a": 1}),) if CALL in text else ())
    # The tokens of a call are tokens of the answer, though their text is not its content.
    assert bytes_of(reading.logprobs) == text.encode()


def test_where_one_call_is_all_entries_end_with_it() -> None:
    body = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 500}
    with run_engine(say(CALL * 9)) as engine:
        whole, streamed = ask_all(engine, body, body | {"stream": True})
    reading = read_one(whole)
    assert read_one(streamed) == reading
    assert (reading.reason, reading.calls) == ("tool_calls", (("f", {"a": 1}),))
    assert bytes_of(reading.logprobs) == CALL[: CALL.index("}") + 1].encode()


# Refusals


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": True}, "top_logprobs"),
    ],
)
def test_bad_values_are_refused_by_name(fields: dict[str, Any], where: str) -> None:
    with run_engine() as engine:
        answer = send(engine, CHAT, **({"logprobs": True} | fields))
    assert (answer.status, answer.json["error"]["param"]) == (422, where)


# The official client


def test_the_official_client_reads_log_probabilities() -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with run_engine(say("a😀")) as engine, connect_openai(engine) as client:
        whole = client.chat.completions.create(
            model="m", messages=messages, logprobs=True, top_logprobs=2, temperature=0
        )
        with client.chat.completions.stream(
            model="m", messages=messages, logprobs=True, top_logprobs=2, temperature=0
        ) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_completion()
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == "a😀"
    assert [len(entry.top_logprobs) for entry in content] == [2] * 5
    assert streamed.choices[0].logprobs is not None
    assert streamed.choices[0].logprobs.content == content
    assert "logprobs.content.done" in kinds
