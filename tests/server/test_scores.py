"""Log-probabilities of ``/v1/completions``, of answers and of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from answers import COMPLETIONS, read, read_one, run_engine, send, send_all, usage_of
from fake_engine import Answer
from fakes import EOS, ByteTokenizer, DistinctModel, answer_script

ANSWERS = {"Hi ": "you", "ab": "cd😀e", "": "nothing"}
SMILE = list("😀".encode())
BOS = 257


class NamingTokenizer(ByteTokenizer):
    """Names its special tokens; a text begins with one of them and a space, as SentencePiece has it."""

    def encode(self, text: str, *, add_bos: bool | None = None, allow_special: bool = False) -> list[int]:
        return [BOS, *f" {text}".encode()]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        names = {} if skip_special else {BOS: b"<s>", EOS: b"<|end|>"}
        return b"".join(names.get(i, self.token_bytes(i)) for i in ids).decode(errors="replace")


def complete(engine: Any, prompt: Any, **fields: Any) -> Answer:
    return send(engine, COMPLETIONS, prompt=prompt, **fields)


def check_lists(logprobs: dict[str, Any], text: str, num_top: int) -> None:
    """What holds of all that is ASCII."""
    lengths = {len(values) for values in logprobs.values()}
    assert lengths == {len(text)}
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["text_offset"] == list(range(len(text)))
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        if logprob is None or num_top == 0:
            assert top is None
        else:
            assert top[token] == logprob
            assert num_top <= len(top) <= num_top + 1
            values = list(top.values())
            assert all(math.isfinite(value) and value <= 0 for value in values)
            assert values[:num_top] == sorted(values[:num_top], reverse=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_log_probabilities_of_an_answer(num_top: int, stream: bool) -> None:
    with run_engine(spread=7.0) as engine:
        reading = read_one(
            complete(engine, "Hi", logprobs=num_top, temperature=1.5, seed=3, top_k=0, stream=stream)
        )
    assert len(reading.text) == 16
    check_lists(reading.logprobs, reading.text, num_top)


@pytest.mark.parametrize("num_top", [0, 1, 3])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_an_echo_with_log_probabilities_scores_the_prompt(max_tokens: int, num_top: int) -> None:
    fields = {"prompt": "Score me", "echo": True, "logprobs": num_top, "max_tokens": max_tokens}
    with run_engine(kind=DistinctModel, spread=7.0) as engine:
        whole, streamed = send_all(engine, COMPLETIONS, fields, fields | {"stream": True})
    reading = read_one(whole)
    assert read_one(streamed) == reading
    assert reading.text.startswith("Score me")
    assert len(reading.text) == len("Score me") + max_tokens
    check_lists(reading.logprobs, reading.text, num_top)
    assert reading.logprobs["token_logprobs"][0] is None
    assert None not in reading.logprobs["token_logprobs"][1:]


def test_a_prompt_is_scored_as_the_same_text_is_when_it_is_sampled() -> None:
    with run_engine(kind=DistinctModel, spread=3.0) as engine:
        sampled, scored = send_all(
            engine,
            COMPLETIONS,
            {"prompt": "Hi", "logprobs": 2, "max_tokens": 12},
            {"prompt": "Hi" + "x", "logprobs": 2, "max_tokens": 0, "echo": True},
        )
        text = read_one(sampled).text
        again = read_one(complete(engine, "Hi" + text, logprobs=2, max_tokens=0, echo=True))
    assert read_one(scored).text == "Hix"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        expected = read_one(sampled).logprobs[name]
        if name == "text_offset":
            expected = [offset + 2 for offset in expected]
        assert again.logprobs[name][2:] == expected


def test_a_greedy_continuation_is_known_by_its_scores() -> None:
    """As lm-eval does it: prompts of ids, one of the alternatives, and exact comparison of floats."""
    with run_engine(kind=DistinctModel, spread=3.0) as engine:
        greedy = read_one(complete(engine, "Hi", max_tokens=8)).text
        prompts = [list(f"Hi{text}".encode()) for text in (greedy, "somethng")]
        choices = complete(engine, prompts, max_tokens=1, logprobs=1, echo=True).json["choices"]
    found = []
    for choice in choices:
        scores, tops = (choice["logprobs"][key][2:-1] for key in ("token_logprobs", "top_logprobs"))
        assert len(scores) == len(tops) == 8
        found.append(all(score == max(top.values()) for score, top in zip(scores, tops, strict=True)))
    assert found == [True, False]


def test_scores_of_several_prompts_are_those_of_each_alone() -> None:
    prompts = ["one", "the second, of several chunks", "3"]
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 3}
    with run_engine(kind=DistinctModel, spread=7.0, max_step_tokens=16) as engine:
        together, streamed, *alone = send_all(
            engine,
            COMPLETIONS,
            {"prompt": prompts, "n": 2, **fields},
            {"prompt": prompts, "n": 2, **fields, "stream": True},
            *({"prompt": prompt, **fields} for prompt in prompts),
        )
    expected = [read_one(answer) for answer in alone for _ in range(2)]
    assert read(together) == read(streamed) == expected


def test_a_scored_prompt_is_computed_though_it_is_cached() -> None:
    body = {"prompt": "x" * 40, "logprobs": 1, "max_tokens": 1}
    scored = body | {"echo": True}
    with run_engine(kind=DistinctModel) as engine:
        first, second, third = send_all(engine, COMPLETIONS, scored, scored, body)
    assert read_one(first) == read_one(second)
    cached = [usage_of(answer)["prompt_tokens_details"]["cached_tokens"] for answer in (second, third)]
    assert cached == [0, 36]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_are_parts_of_characters_are_named_by_their_bytes(stream: bool) -> None:
    with run_engine(answer_script(ANSWERS), kind=DistinctModel) as engine:
        reading = read_one(complete(engine, "é ab", echo=True, logprobs=1, stream=stream))
    assert reading.text == "é abcd😀e"
    spelled = [f"bytes:\\x{byte:02x}" for byte in SMILE]
    assert reading.logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", *" abcd", *spelled, "e"]
    # All parts of a character stand where it does.
    assert reading.logprobs["text_offset"] == [0, 0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 7]


def test_an_echo_of_ids_names_special_tokens() -> None:
    with run_engine(answer_script({"b": "c"}), tokenizer=NamingTokenizer()) as engine:
        assert read_one(complete(engine, [97, EOS, 98], echo=True)).text == "a<|end|>bc"


def test_offsets_after_special_tokens_point_into_the_text() -> None:
    with run_engine(answer_script({"b": "cd"}), kind=DistinctModel, tokenizer=NamingTokenizer()) as engine:
        reading = read_one(complete(engine, [97, EOS, 98], echo=True, logprobs=1))
    assert reading.text == "a<|end|>bcd"
    assert reading.logprobs["tokens"] == ["a", "<|end|>", "b", "c", "d"]
    assert reading.logprobs["text_offset"] == [0, 1, 8, 9, 10]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_do_not_count_what_the_tokenizer_puts_before_a_text(stream: bool) -> None:
    with run_engine(answer_script({"b": "cd"}), kind=DistinctModel, tokenizer=NamingTokenizer()) as engine:
        reading = read_one(complete(engine, "éab", echo=True, logprobs=1, stream=stream))
    assert reading.text == "éabcd"
    assert reading.logprobs["tokens"] == ["<s>", " ", "bytes:\\xc3", "bytes:\\xa9", "a", "b", "c", "d"]
    assert reading.logprobs["text_offset"] == [0, 0, 0, 0, 1, 2, 3, 4]


def test_a_prompt_that_breaks_off_in_a_character_has_offsets_too() -> None:
    with run_engine(lambda _: ord("c"), kind=DistinctModel) as engine:
        fields = {"echo": True, "logprobs": 1, "max_tokens": 2}
        reading = read_one(complete(engine, [97, *SMILE[:2], 98, *SMILE[:3]], **fields))
    assert reading.text == "a\ufffdb\ufffdcc"
    assert reading.logprobs["text_offset"] == [0, 1, 1, 1, 3, 3, 3, 4, 5]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_log_probabilities_with_the_text(stream: bool) -> None:
    with run_engine(answer_script(ANSWERS)) as engine:
        reading = read_one(complete(engine, "Hi ", logprobs=0, stop="u", stream=stream))
    assert reading.text == "".join(reading.logprobs["tokens"]) == "yo"
