"""Log-probabilities: their values, and when the entry of a token is handed out."""

from __future__ import annotations

import codecs
import math
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_triton.engine.logprobs import LEAST_LOGPROB, read_score, score_tokens
from astrai_triton.engine.params import SamplingParams
from astrai_triton.engine.result import TaskHandle, TokenEvent, TokenLogprob
from astrai_triton.engine.sampling import SampledToken, SampleRow, SamplingPipeline
from astrai_triton.engine.stops import StopMatcher
from astrai_triton.engine.task import Task
from astrai_triton.tokenizer.detokenize import Detokenizer, whole_texts
from sampling_paths import Path, all_paths

GONE = -math.inf


def oracle(logits: torch.Tensor) -> list[list[float]]:
    """Float64 log-softmax, cut off from below."""
    return logits.double().log_softmax(1).clamp(min=LEAST_LOGPROB).tolist()


def likeliest(row: list[float], num: int) -> list[int]:
    return sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))[:num]


@st.composite
def logit_rows(draw: st.DrawFn) -> torch.Tensor:
    """Multiples of 1/8 with many ties, some masked, but not whole rows."""
    width = draw(st.sampled_from([1, 2, 19, 20, 21, 64, 65, 255, 256, 257, 700, 2100, 4096]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0, 3, 40, 80_000]))
    logits = rng.integers(-spread, spread + 1, (draw(st.integers(1, 5)), width)).astype(np.float32) / 8
    masked = rng.random(logits.shape) < draw(st.sampled_from([0.0, 0.2, 0.999]))
    masked[:, rng.integers(width)] = False
    logits[masked] = GONE
    return torch.from_numpy(logits)


@all_paths
@settings(deadline=None, max_examples=80)
@given(logits=logit_rows(), num_top=st.integers(0, 20), seed=st.integers(0, 2**32))
def test_scores_are_a_float64_log_softmax_and_its_first_places(
    path: Path, logits: torch.Tensor, num_top: int, seed: int
) -> None:
    width = logits.shape[1]
    ids = torch.randint(width, (len(logits),), generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    with path():
        scores = score_tokens(logits, ids, num_top)
    assert scores.shape == (len(logits), 1 + 2 * min(num_top, width))
    assert torch.equal(logits, before)
    for row, token_id, raw, expected in zip(
        scores.tolist(), ids.tolist(), logits.tolist(), oracle(logits), strict=True
    ):
        logprob, top = read_score(row, num_top)
        assert logprob == pytest.approx(expected[token_id], abs=1e-6)
        assert [place for place, _ in top] == likeliest(raw, num_top)
        assert [value for _, value in top] == pytest.approx([expected[place] for place, _ in top], abs=1e-6)


@all_paths
def test_scores_of_a_row_do_not_depend_on_its_batch_or_on_how_many_others_are_wanted(path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    # Logits of a bfloat16 model: many are equal.
    logits = (torch.randn(7, 49152, generator=generator) * 3).bfloat16().float()
    ids = torch.randint(49152, (7,), generator=generator)
    with path():
        together = score_tokens(logits, ids, 20)
        for i in range(7):
            assert torch.equal(score_tokens(logits[i : i + 1], ids[i : i + 1], 20)[0], together[i])
            fewer = read_score(score_tokens(logits[i : i + 1], ids[i : i + 1], 5)[0].tolist(), 5)
            assert fewer == read_score(together[i].tolist(), 5)
        assert torch.equal(score_tokens(logits, ids)[:, 0], together[:, 0])


@all_paths
def test_scores_stay_finite_and_say_nan_only_where_logits_are_not_finite(path: Path) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, GONE], [0.0, math.nan, 0, 0], [0, math.inf, 0, 0], [GONE] * 4])
    with path():
        scores = score_tokens(logits, torch.zeros(4, dtype=torch.int64), 4).tolist()
    floor = LEAST_LOGPROB
    assert read_score(scores[0], 4) == (0.0, ((0, 0.0), (2, floor), (1, floor), (3, floor)))
    assert [math.isnan(row[0]) for row in scores] == [False, True, True, True]


# The sampler


def test_alternatives_are_of_the_raw_logits_whatever_was_edited_or_cut() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0, 1.0]]).log()
    expected = [(2, math.log(4 / 8)), (1, math.log(2 / 8)), (0, math.log(1 / 8))]
    edits: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"temperature": 0.3, "top_k": 1},
        {"logit_bias": {0: 100.0}},
        {"repetition_penalty": 3.0, "presence_penalty": 2.0},
    ]
    for edit in edits:
        params = SamplingParams(logprobs=True, top_logprobs=3, **edit)
        (token,) = SamplingPipeline()(logits, [SampleRow(params, 2, 3, counts={2: 5})])
        assert [token_id for token_id, _ in token.top] == [2, 1, 0]
        assert [value for _, value in token.top] == pytest.approx([value for _, value in expected], abs=1e-6)


@pytest.mark.parametrize("num_top", [1, 3, 20])
def test_each_row_gets_as_many_alternatives_as_it_asked_for(num_top: int) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    asked = [0, num_top, 20, 0, 2]
    rows = [
        SampleRow(SamplingParams(logprobs=bool(num) or i == 3, top_logprobs=num), i, 0)
        for i, num in enumerate(asked)
    ]
    tokens = SamplingPipeline()(logits, rows)
    assert [len(token.top) for token in tokens] == asked
    assert [token.logprob is None for token in tokens] == [True, False, False, False, False]
    assert tokens == [SamplingPipeline()(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]


def test_a_vocabulary_smaller_than_the_alternatives_gives_all_of_it() -> None:
    params = SamplingParams(logprobs=True, top_logprobs=20)
    (token,) = SamplingPipeline()(torch.zeros(1, 3), [SampleRow(params, 0, 0)])
    assert token.top == tuple((token_id, token.logprob) for token_id in range(3))


def test_a_row_that_is_not_finite_has_no_scores() -> None:
    logits = torch.zeros(2, 50)
    logits[1, 7] = math.nan
    params = SamplingParams(logprobs=True, top_logprobs=5)
    healthy, broken = SamplingPipeline()(logits, [SampleRow(params, 0, 0)] * 2)
    assert len(healthy.top) == 5
    assert broken == SampledToken(-1)


# The entries of a task


def build_task(pieces: list[bytes], stop_id: int | None = None, **fields: Any) -> Task:
    """A task whose token ``i`` stands for ``pieces[i]``."""
    params = SamplingParams(**({"logprobs": True} | fields))
    return Task(
        handle=TaskHandle("task", 1, params, lambda: None),
        params=params,
        prompt_len=1,
        max_tokens=100 if params.max_tokens is None else params.max_tokens,
        tokens=[0],
        seed=0,
        stop_ids=frozenset() if stop_id is None else frozenset({stop_id}),
        text_decoder=Detokenizer(pieces, whole_texts(pieces)),
        stops=StopMatcher(params.stop),
        arrival=0,
    )


def score_of(token_id: int) -> SampledToken:
    return SampledToken(token_id, -0.5 * token_id, ((token_id, -0.5 * token_id), (9999, -7.0)))


def run(task: Task, ids: range) -> list[TokenEvent]:
    """Feed tokens until the task ends."""
    events: list[TokenEvent] = []
    for token_id in ids:
        events.append(task.accept(score_of(token_id)))
        if task.is_done:
            break
    return events


def num_chars(data: bytes) -> int:
    """Characters that are whole once these bytes have come."""
    return len(codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data))


@attrs.frozen
class Answer:
    """Tokens by their bytes, what ends them, and the stop strings."""

    pieces: list[bytes]
    stops: tuple[str, ...]
    has_stop_id: bool


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    """Texts cut anywhere, inside of characters too, or any bytes at all; tokens without bytes among them."""
    text = draw(st.one_of(st.text("abé🙂", max_size=16).map(str.encode), st.binary(max_size=12)))
    borders = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *borders, len(text)]
    pieces = [text[low:high] for low, high in pairwise(edges)]
    stops = draw(st.lists(st.text("abé🙂�", min_size=1, max_size=4), max_size=3))
    return Answer(pieces, tuple(stops), draw(st.booleans()))


@settings(deadline=None, max_examples=400)
@given(answers())
def test_joined_entries_are_those_of_the_tokens_that_begin_before_the_cut(answer: Answer) -> None:
    pieces = answer.pieces
    stop_id = len(pieces) if answer.has_stop_id else None
    num = len(pieces) if stop_id is None else len(pieces) + 1
    task = build_task([*pieces, b""], stop_id, stop=answer.stops, max_tokens=num)
    events = run(task, range(num))
    text = "".join(event.text for event in events)
    sampled = [event.token_id for event in events if event.token_id != stop_id]
    begins = [num_chars(b"".join(pieces[:i])) for i in range(len(sampled))]
    is_cut = events[-1].stop_string is not None
    entries = [entry for event in events for entry in event.logprobs]
    assert entries == [
        TokenLogprob(i, -0.5 * i, ((i, -0.5 * i), (9999, -7.0)), begin)
        for i, begin in enumerate(begins)
        if not is_cut or begin < len(text)
    ]
    assert is_cut or b"".join(pieces[i] for i in range(len(sampled))).decode(errors="replace") == text


@settings(deadline=None, max_examples=400)
@given(answers())
def test_an_entry_comes_with_the_event_that_releases_the_end_of_its_text(answer: Answer) -> None:
    pieces = answer.pieces
    task = build_task([*pieces, b"!"], stop=answer.stops, max_tokens=len(pieces) + 1)
    num_released = num_settled = 0
    for event in run(task, range(len(pieces) + 1))[:-1]:
        num_released += len(event.text)
        num_settled += len(event.logprobs)
        assert event.token_id is not None
        # What a token completes ends here; a token that completes nothing goes with the next character.
        ends = [
            max(num_chars(b"".join(pieces[: i + 1])), num_chars(b"".join(pieces[:i])) + 1)
            for i in range(event.token_id + 1)
        ]
        assert num_settled == sum(end <= num_released for end in ends)


def settle(pieces: list[bytes], **fields: Any) -> list[tuple[str, list[int]]]:
    """Text and entries' tokens of each event; the last token is a stop token."""
    task = build_task([*pieces, b""], len(pieces), **fields)
    events = run(task, range(len(pieces) + 1))
    return [(event.text, [entry.token_id for entry in event.logprobs]) for event in events]


def test_entries_wait_for_a_stop_string_that_may_still_come() -> None:
    assert settle([b"a", b"x", b"y", b"b"], stop="xyz") == [
        ("a", [0]),
        ("", []),
        ("", []),
        ("xyb", [1, 2, 3]),
        ("", []),
    ]


def test_a_token_that_a_stop_string_cuts_keeps_its_entry_and_those_behind_lose_theirs() -> None:
    assert settle([b"one", b" EN", b"D"], stop="END") == [("one", [0]), (" ", []), ("", [1])]
    assert settle([b"one", b"EN", b"D"], stop="END") == [("one", [0]), ("", []), ("", [])]


def test_the_bytes_of_one_character_settle_together() -> None:
    smile = "🙂".encode()
    assert settle([smile[:2], smile[2:3], smile[3:] + b"!"]) == [
        ("", []),
        ("", []),
        ("🙂!", [0, 1, 2]),
        ("", []),
    ]
    assert settle([smile[:2], smile[2:3]]) == [("", []), ("", []), ("�", [0, 1])]


def test_entries_whose_text_is_never_released_are_not_handed_out() -> None:
    task = build_task([b"a", b"x"], stop="xyz")
    released = run(task, range(2))
    assert [len(event.logprobs) for event in released] == [1, 0]
    assert task.end("cancelled").logprobs == ()


def test_the_event_keeps_the_log_probability_of_its_own_token_a_stop_token_too() -> None:
    task = build_task([b"a", b"b", b""], stop_id=2)
    assert [event.logprob for event in run(task, range(3))] == [0.0, -0.5, -1.0]


def test_a_task_that_asks_for_none_has_no_entries() -> None:
    task = build_task([b"a", b"b"], logprobs=False, stop="zz")
    assert [event.logprobs for event in run(task, range(2))] == [(), ()]
