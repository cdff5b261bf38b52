"""Tokens of several characters, with stop strings inside, across and beside them."""

from __future__ import annotations

import pytest

from astrai_triton.engine import InferenceEngine, SamplingParams, TokenEvent
from drive import assert_nothing_held, drain_events, run_all
from fakes import EOS, ByteDetokenizer, ByteTokenizer, ScriptedModel

WORDS = {1: " once", 2: " upon", 3: " a t", 4: "ime", 5: "."}


class WordDetokenizer(ByteDetokenizer):
    def push(self, token_id: int) -> str:
        return WORDS.get(token_id, "")


class WordTokenizer(ByteTokenizer):
    def detokenizer(self) -> ByteDetokenizer:
        return WordDetokenizer()


def run(**fields: object) -> list[TokenEvent]:
    """Events of " once upon a time."."""
    model = ScriptedModel(lambda context: len(context) if len(context) <= len(WORDS) else EOS)
    sizes: dict[str, int] = {"max_batch_size": 2, "max_seq_len": 64, "page_size": 4, "n_tokens": 64}
    engine = InferenceEngine(model, WordTokenizer(), start=False, **sizes)  # type: ignore[arg-type]
    handle = engine.submit([97], SamplingParams(temperature=0.0, **fields))  # type: ignore[arg-type]
    run_all(engine)
    assert_nothing_held(engine)
    return drain_events(handle)


def ask(**fields: object) -> tuple[list[str], str | None, str | None, int]:
    """Texts of the events, finish reason, stop string and number of tokens."""
    events = run(**fields)
    last = events[-1]
    return [event.text for event in events], last.finish_reason, last.stop_string, last.completion_tokens


def test_without_stops_the_first_space_is_kept() -> None:
    assert ask() == ([" once", " upon", " a t", "ime", ".", ""], "stop", None, 6)


@pytest.mark.parametrize(
    ("stops", "text", "matched", "num_tokens"),
    [
        ("nc", " o", "nc", 1),
        ("upon a tim", " once ", "upon a tim", 4),
        (" a time.", " once upon", " a time.", 5),
        (("ime", "p", " a"), " once u", "p", 2),
        (" once", "", " once", 1),
    ],
    ids=["inside one token", "over three tokens", "to the end", "several", "the whole token"],
)
def test_a_stop_string_cuts_before_it_and_ends_the_task(
    stops: str | tuple[str, ...], text: str, matched: str, num_tokens: int
) -> None:
    pieces, reason, stop, count = ask(stop=stops)
    assert "".join(pieces) == text
    assert (reason, stop, count) == ("stop", matched, num_tokens)
    assert not any(matched in piece for piece in pieces)


def test_what_was_held_back_for_a_stop_is_given_when_the_limit_comes_first() -> None:
    assert ask(stop="upon a tim", max_tokens=3) == ([" once", " ", "upon a t"], "length", None, 3)


@pytest.mark.parametrize("stops", [(), []])
def test_no_stops_are_no_stops(stops: object) -> None:
    assert "".join(ask(stop=stops)[0]) == " once upon a time."


@pytest.mark.parametrize(
    ("fields", "settled"),
    [
        ({}, [[1], [2], [3], [4], [5], []]),
        ({"stop": "Never"}, [[1], [2], [3], [4], [5], []]),
        ({"stop": "nc"}, [[1]]),
        ({"stop": "upon a tim"}, [[1], [], [], [2]]),
        ({"stop": " a time."}, [[1], [2], [], [], []]),
        ({"stop": "upon a tim", "max_tokens": 3}, [[1], [], [2, 3]]),
        ({"stop_token_ids": (3,)}, [[1], [2], []]),
    ],
    ids=["no stop", "none that matches", "inside one", "over three", "at a border", "length", "stop token"],
)
def test_entries_come_with_their_text_and_end_where_it_is_cut(
    fields: dict[str, object], settled: list[list[int]]
) -> None:
    events = run(logprobs=True, top_logprobs=2, **fields)
    assert [[entry.token_id for entry in event.logprobs] for event in events] == settled
    for entry in [entry for event in events for entry in event.logprobs]:
        assert entry.offset == len("".join(WORDS[token_id] for token_id in range(1, entry.token_id)))
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert len(entry.top) == 2
