"""``/v1/completions`` over the scripted model: prompts, echo, scores of prompts, several choices, errors."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from answers import (
    COMPLETIONS,
    connect_openai,
    load_frames,
    make_body,
    read,
    read_one,
    run_engine,
    send,
    send_all,
    usage_of,
)
from astrai_triton.engine import InferenceEngine
from fake_engine import Answer, Client, ask
from fakes import DistinctModel, answer_script

ANSWERS = {"Hi ": "you", "ab": "cd😀e", "": "nothing"}


def complete(engine: Any, prompt: Any, **fields: Any) -> Answer:
    return send(engine, COMPLETIONS, prompt=prompt, **fields)


def refuse(engine: Any, prompt: Any = "ab", **fields: Any) -> Answer:
    answer = complete(engine, prompt, **fields)
    assert answer.status in (400, 422), answer.body
    return answer


# Prompts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("Hi ", ["you"]),
        (["Hi "], ["you"]),
        (["ab", "Hi "], ["cd😀e", "you"]),
        (list(b"Hi "), ["you"]),
        ([list(b"ab"), list(b"Hi ")], ["cd😀e", "you"]),
        ([list(b"ab")], ["cd😀e"]),
    ],
)
def test_a_prompt_is_text_ids_or_a_list_of_those(prompt: Any, texts: list[str], stream: bool) -> None:
    with run_engine(answer_script(ANSWERS)) as engine:
        readings = read(complete(engine, prompt, stream=stream))
    assert [(reading.text, reading.reason) for reading in readings] == [(text, "stop") for text in texts]


def test_a_whole_answer_object() -> None:
    with run_engine(answer_script(ANSWERS)) as engine:
        body = complete(engine, "Hi ", model="mine", max_tokens=2).json
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "text_completion",
        "model": "mine",
        "choices": [{"index": 0, "text": "yo", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_sixteen_tokens_come_where_no_number_is_given() -> None:
    with run_engine() as engine:
        answer = complete(engine, "x")
    assert (len(read_one(answer).text), read_one(answer).reason) == (16, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_cut_off(stream: bool) -> None:
    with run_engine(answer_script(ANSWERS)) as engine:
        reading = read_one(complete(engine, "Hi ", stop=["ou", "u"], stream=stream))
    assert (reading.text, reading.reason) == ("y", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts_come_in_order(stream: bool) -> None:
    with run_engine(answer_script(ANSWERS)) as engine:
        answer = complete(engine, ["Hi ", "ab"], n=3, stream=stream)
    assert [reading.text for reading in read(answer)] == ["you"] * 3 + ["cd😀e"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_a_prompt_once_and_every_sampled_token(stream: bool) -> None:
    with run_engine(answer_script(ANSWERS)) as engine:
        usage = usage_of(complete(engine, ["Hi ", "ab"], n=3, stream=stream))
    sampled = 3 * (len("you") + 1) + 3 * (len("cd😀e".encode()) + 1)
    counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
    assert counts == (5, sampled, 5 + sampled)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_comes_again_is_cached(stream: bool) -> None:
    prompts = ["x" * 40, "y" * 60]
    with run_engine() as engine:
        answers = send_all(engine, COMPLETIONS, *[{"prompt": prompts, "n": 2, "stream": stream}] * 2)
    cached = [usage_of(answer)["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    # Whole pages, without the last token, which must pass through the model.
    assert cached == [0, 36 + 56]


def test_the_frame_of_the_usage_comes_once_and_last() -> None:
    with run_engine(answer_script(ANSWERS)) as engine:
        options = {"include_usage": True}
        frames = load_frames(complete(engine, ["Hi ", "ab"], stream=True, stream_options=options))
    assert [frame["choices"] for frame in frames if frame["usage"]] == [[]]
    assert frames[-1]["usage"]["total_tokens"] == 5 + 4 + 8


# Echo


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Hi ", list(b"Hi ")])
def test_an_echo_comes_before_the_answer(prompt: Any, stream: bool) -> None:
    with run_engine(answer_script(ANSWERS)) as engine:
        readings = read(complete(engine, [prompt] if stream else prompt, n=2, echo=True, stream=stream))
    assert [reading.text for reading in readings] == ["Hi you"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_all_that_comes_where_no_tokens_are_wanted(stream: bool) -> None:
    with run_engine(answer_script(ANSWERS)) as engine:
        answer = complete(engine, ["Hi ", "ab"], echo=True, max_tokens=0, stream=stream)
    assert [(reading.text, reading.reason) for reading in read(answer)] == [
        ("Hi ", "length"),
        ("ab", "length"),
    ]
    assert usage_of(answer)["completion_tokens"] == 0


def test_an_echo_of_a_stream_is_one_frame() -> None:
    with run_engine(answer_script(ANSWERS)) as engine:
        frames = load_frames(complete(engine, "Hi ", echo=True, stream=True))
    assert [frame["choices"][0]["text"] for frame in frames] == ["Hi ", "y", "o", "u", "", ""]


# Refusals


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([[97], []], "prompt[1]"),
        ([97, -1], "prompt[1]"),
        ([260], "prompt[0]"),
        ([[97], [97, 260]], "prompt[1][1]"),
        ([97, "a"], "prompt[1]"),
        (["a", 97], "prompt[1]"),
        ([True], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([[97], ["a"]], "prompt[1][0]"),
        ({}, "prompt"),
        (5, "prompt"),
        (None, "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_with_its_path(prompt: Any, where: str) -> None:
    with run_engine() as engine:
        answer = refuse(engine, prompt)
    assert answer.status == 422
    assert answer.json["error"]["param"] == where


def test_a_body_without_a_prompt_is_refused() -> None:
    async def use(client: Client) -> Answer:
        return await client.post(COMPLETIONS, {"max_tokens": 3})

    with run_engine() as engine:
        answer = ask(engine, use)
    assert (answer.status, answer.json["error"]["param"]) == (422, "prompt")


@pytest.mark.parametrize(
    ("fields", "where", "status"),
    [
        ({"n": 0}, "n", 422),
        ({"n": 129}, "n", 422),
        ({"logprobs": 21}, "logprobs", 422),
        ({"logprobs": True}, "logprobs", 422),
        ({"best_of": 3}, "best_of", 400),
        ({"suffix": "x"}, "suffix", 400),
        ({"max_tokens": -1}, "max_tokens", 422),
        ({"stop": [""]}, "stop[0]", 422),
        ({"logit_bias": {"260": 1}}, 'logit_bias["260"]', 422),
        ({"stop_token_ids": [260]}, "stop_token_ids[0]", 422),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], where: str, status: int) -> None:
    with run_engine() as engine:
        answer = refuse(engine, **fields)
    assert (answer.status, answer.json["error"]["param"]) == (status, where)


def test_too_many_choices_are_refused() -> None:
    with run_engine() as engine:
        answer = refuse(engine, ["a"] * 65, n=2)
    assert answer.json["error"]["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x" * 64, ["a", "x" * 64]])
def test_a_prompt_that_fills_the_context_is_refused_with_all_others(prompt: Any, stream: bool) -> None:
    with run_engine(max_seq_len=64) as engine:
        answer = refuse(engine, prompt, stream=stream)
        assert engine.get_stats()["total_tasks"] == 0
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")


def test_the_longest_prompt_decides_how_many_tokens_can_come() -> None:
    with run_engine(max_seq_len=64) as engine:
        readings = read(complete(engine, ["x" * 60, "y"], max_tokens=100))
    assert [(len(reading.text), reading.reason) for reading in readings] == [(4, "length")] * 2


# The official client


def test_the_official_client_reads_whole_answers() -> None:
    with run_engine(answer_script(ANSWERS), kind=DistinctModel) as engine, connect_openai(engine) as client:
        answer = client.completions.create(
            model="m", prompt=["Hi ", "ab"], n=2, logprobs=2, echo=True, temperature=0
        )
    assert [choice.text for choice in answer.choices] == ["Hi you"] * 2 + ["abcd😀e"] * 2
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("Hi you")
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[-1]["u"] == logprobs.token_logprobs[-1]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


def test_the_official_client_reads_streams() -> None:
    texts, reasons, logprobs = dict[int, str](), dict[int, str](), list[float]()
    with run_engine(answer_script(ANSWERS)) as engine, connect_openai(engine) as client:
        for chunk in client.completions.create(
            model="m", prompt=["Hi ", "ab"], n=2, logprobs=1, temperature=0, stream=True
        ):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                if choice.finish_reason is not None:
                    assert choice.index not in reasons
                    reasons[choice.index] = choice.finish_reason
                if choice.logprobs is not None:
                    logprobs += choice.logprobs.token_logprobs or []
    assert texts == {0: "you", 1: "you", 2: "cd😀e", 3: "cd😀e"}
    assert reasons == dict.fromkeys(range(4), "stop")
    assert len(logprobs) == 2 * 3 + 2 * 7
    assert all(math.isfinite(value) for value in logprobs)


def test_many_clients_get_what_they_get_alone() -> None:
    bodies = [
        make_body(
            prompt=["x" * (5 * i + 1), "y" * (i + 1)],
            n=1 + i % 3,
            max_tokens=3 + i,
            seed=i,
            temperature=1,
            echo=i % 2 == 0,
            logprobs=i % 4 if i % 2 else None,
            stream=i % 3 == 0,
        )
        for i in range(10)
    ]

    async def use(client: Client) -> None:
        together = await asyncio.gather(*(client.post(COMPLETIONS, body) for body in bodies))
        alone = [await client.post(COMPLETIONS, body) for body in bodies]
        assert [read(answer) for answer in together] == [read(answer) for answer in alone]

    with run_engine(spread=9.0) as engine:
        ask(engine, use)


def run_stream_error(engine: InferenceEngine, **fields: Any) -> dict[str, Any]:
    answer = complete(engine, stream=True, **fields)
    assert answer.status == 200
    assert b"[DONE]" not in answer.body
    return dict(json.loads(answer.frames[-1].removeprefix("data: ")))


def test_a_fault_in_one_choice_ends_the_stream_with_one_error() -> None:
    def fail(contexts: list[tuple[int, ...]]) -> None:
        if any(len(context) > 6 and context[0] == ord("b") for context in contexts):
            raise RuntimeError("secret")

    with run_engine(on_forward=fail) as engine:
        error = run_stream_error(engine, prompt=["aaaa", "bbbb"], max_tokens=500)
        assert engine.drain(10)
        assert engine.get_stats()["total_tokens"] < 400
    assert error.keys() == {"error"}
    assert error["error"]["type"] == "api_error"


def test_a_prompt_that_is_too_long_is_the_prompts_fault() -> None:
    async def use(client: Client) -> Answer:
        return await client.post("/v1/completions", {"prompt": "x" * 600, "max_tokens": 1})

    with run_engine(max_seq_len=64) as engine:
        answer = ask(engine, use)
    assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")
    assert answer.json["error"]["code"] == "context_length_exceeded"


def test_more_choices_than_the_queue_takes_are_refused_by_name() -> None:
    async def use(client: Client) -> Answer:
        return await client.post("/v1/completions", {"prompt": "x", "n": 5})

    with run_engine(max_queue=4) as engine:
        answer = ask(engine, use)
    assert (answer.status, answer.json["error"]["param"]) == (422, "n")
