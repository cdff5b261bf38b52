"""Answers that a grammar constrains: masks in the sampler, and how such a task ends."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_triton.engine.intake import Intake
from astrai_triton.engine.params import SamplingParams
from astrai_triton.engine.result import TaskHandle, TokenEvent
from astrai_triton.engine.sampling import SampledToken, SampleRow, SamplingPipeline
from astrai_triton.engine.stops import StopMatcher
from astrai_triton.engine.task import Task
from astrai_triton.errors import GrammarError, NonFiniteLogitsError
from astrai_triton.grammar import Grammar
from drive import assert_nothing_held, build_engine, finish
from fakes import EOS, VOCAB, ByteDetokenizer, ScriptedModel
from sampling_paths import Path, all_paths


class FakeMatcher:
    """Follows one of several texts, byte by byte; ``EOS`` may come where one of them is complete."""

    def __init__(self, *texts: bytes) -> None:
        self._texts = texts
        self._done = b""

    @property
    def _allowed(self) -> set[int]:
        num = len(self._done)
        fitting = [text for text in self._texts if text.startswith(self._done)]
        return {text[num] if num < len(text) else EOS for text in fitting}

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        _write(mask, self._allowed)

    def accept(self, token_id: int) -> None:
        if token_id not in self._allowed:
            raise GrammarError(f"{token_id} must not come")
        self._done += bytes([token_id])

    @property
    def is_accepting(self) -> bool:
        return EOS in self._allowed

    @property
    def is_complete(self) -> bool:
        return self._allowed == {EOS}


class SetMatcher:
    """Allows some tokens, whatever came before."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self.allowed = allowed

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        _write(mask, self.allowed)


def _write(mask: npt.NDArray[np.int32], allowed: Sequence[int] | set[int]) -> None:
    bits = np.zeros(len(mask) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    mask[:] = np.packbits(bits, bitorder="little").view(np.int32)


def row_of(allowed: Sequence[int] | None, position: int = 0, **fields: Any) -> SampleRow:
    """A row that may draw ``allowed``; None: everything."""
    suppressed, counts = fields.pop("suppressed", ()), fields.pop("counts", {})
    matcher: Any = None if allowed is None else SetMatcher(allowed)
    return SampleRow(SamplingParams(**fields), 7, position, counts, suppressed, matcher)


# The sampler


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[SampleRow]]:
    """Rows with and without a grammar, of all parameters."""
    width = draw(st.sampled_from([1, 2, 31, 32, 33, 64, 260, 700, 2100]))
    num = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.integers(-40, 41, (num, width)).astype(np.float32) / 8
    rows = []
    for position in range(num):
        chosen = rng.permutation(width)[: draw(st.sampled_from([1, 2, 5, width]))].tolist()
        allowed = draw(st.sampled_from([None, chosen]))
        num_top = draw(st.sampled_from([0, 0, 3]))
        fields: dict[str, Any] = {
            "temperature": draw(st.sampled_from([0.0, 0.7, 1.0, 2.0])),
            "top_k": draw(st.sampled_from([0, 1, 5, 600])),
            "top_p": draw(st.sampled_from([0.0, 0.9, 1.0])),
            "min_p": draw(st.sampled_from([0.0, 0.2])),
            "presence_penalty": draw(st.sampled_from([0.0, 1.0])),
            "logit_bias": {width - 1: draw(st.sampled_from([-100.0, 3.0]))},
            "logprobs": num_top > 0 or draw(st.booleans()),
            "top_logprobs": num_top,
            "counts": {0: 2},
        }
        rows.append(row_of(allowed, position, **fields))
    return torch.from_numpy(logits), rows


@all_paths
@settings(deadline=None, max_examples=100)
@given(batch=batches())
def test_a_mask_is_the_suppression_of_all_else_and_touches_no_other_row(
    path: Path, batch: tuple[torch.Tensor, list[SampleRow]]
) -> None:
    with path():
        check_masks(*batch)


def check_masks(logits: torch.Tensor, rows: list[SampleRow]) -> None:
    before = logits.clone()
    sampled = SamplingPipeline()(logits, rows)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    for i, (row, got) in enumerate(zip(rows, sampled, strict=True)):
        matcher: Any = row.matcher
        forbidden = () if matcher is None else tuple(set(range(logits.shape[1])) - set(matcher.allowed))
        plain = SampleRow(row.params, row.seed, row.position, row.counts, forbidden)
        assert [got] == SamplingPipeline()(logits[i : i + 1], [plain])
        assert got.token_id not in forbidden


@all_paths
@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.5}, {}])
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf])
def test_a_row_that_is_not_finite_ends_so_even_where_the_mask_would_hide_it(
    poison: float, params: dict[str, Any], path: Path
) -> None:
    logits = torch.zeros(2, 100)
    logits[0, 50] = poison
    rows = [row_of([3, 4], **params), row_of([3], logprobs=True, **params)]
    with path():
        broken, healthy = SamplingPipeline()(logits, rows)
    assert broken == SampledToken(-1)
    assert healthy.token_id == 3
    assert healthy.logprob == pytest.approx(-math.log(100), abs=1e-6)


def test_the_mask_comes_after_penalties_and_bias() -> None:
    logits = torch.tensor([[9.0, 5.0, 4.0]])
    rows = [
        row_of([1, 2], temperature=0),
        row_of([1, 2], temperature=0, logit_bias={0: 100.0, 2: 2.0}),
        row_of([1, 2], temperature=0, frequency_penalty=2.0, counts={1: 1}),
    ]
    assert [token.token_id for token in SamplingPipeline()(logits.repeat(3, 1), rows)] == [1, 2, 2]


def test_suppressed_ids_are_drawn_where_the_grammar_leaves_nothing_else() -> None:
    logits = torch.tensor([[9.0] * 31 + [50.0] * 2]).repeat(4, 1)
    rows = [
        row_of([31, 3], temperature=0, suppressed=(31, 32)),
        row_of([31, 32], temperature=0, suppressed=(31, 32)),
        row_of([31, 32], temperature=0, suppressed=(31,)),
        row_of(None, temperature=0, suppressed=(31, 32)),
    ]
    assert [token.token_id for token in SamplingPipeline()(logits, rows)] == [3, 31, 32, 0]


def test_a_grammar_that_allows_no_token_is_an_error() -> None:
    logits = torch.zeros(2, 40)
    with pytest.raises(GrammarError, match="grammar: wanted a token that may come next"):
        SamplingPipeline()(logits, [row_of(None), row_of([])])
    assert torch.equal(logits, torch.zeros(2, 40))


# The task


def build_task(matcher: FakeMatcher, **fields: Any) -> Task:
    params = SamplingParams(**({"max_tokens": 50} | fields))
    assert params.max_tokens is not None
    return Task(
        handle=TaskHandle("task", 1, params, lambda: None),
        params=params,
        prompt_len=1,
        max_tokens=params.max_tokens,
        tokens=[0],
        seed=0,
        stop_ids=frozenset() if params.ignore_eos else frozenset({EOS}),
        text_decoder=ByteDetokenizer(),
        stops=StopMatcher(params.stop),
        matcher=matcher,  # type: ignore[arg-type]
        arrival=0,
    )


def run(task: Task, seed: int = 0) -> list[TokenEvent]:
    """Sample from random logits until the task ends."""
    generator = torch.Generator().manual_seed(seed)
    events: list[TokenEvent] = []
    while not task.is_done:
        logits = torch.randn(1, VOCAB, generator=generator) * 5
        events += [task.accept(token) for token in SamplingPipeline()(logits, [task.sample_row()])]
    return events


def describe(events: list[TokenEvent]) -> tuple[str, str | None]:
    assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
    return "".join(event.text for event in events), events[-1].finish_reason


def test_a_task_that_obeys_a_grammar_is_watched_token_by_token() -> None:
    assert not build_task(FakeMatcher(b"a")).is_quiet


def test_a_complete_answer_ends_at_once_whatever_else_was_asked() -> None:
    for fields in ({}, {"min_tokens": 40}, {"ignore_eos": True}, {"max_tokens": 4}):
        events = run(build_task(FakeMatcher(b"true"), **fields))
        assert describe(events) == ("true", "stop")
        assert [event.token_id for event in events] == list(b"true")
        assert events[-1].completion_tokens == 4


def test_an_answer_that_could_go_on_ends_with_a_stop_token() -> None:
    answers = {describe(run(build_task(FakeMatcher(b"1", b"12")), seed)) for seed in range(40)}
    assert answers == {("1", "stop"), ("12", "stop")}


def test_min_tokens_puts_off_a_stop_token_as_long_as_the_grammar_lets_it() -> None:
    answers = {describe(run(build_task(FakeMatcher(b"1", b"12"), min_tokens=9), seed)) for seed in range(40)}
    assert answers == {("12", "stop")}


def test_an_answer_cut_by_its_length_says_so() -> None:
    assert describe(run(build_task(FakeMatcher(b"true"), max_tokens=3))) == ("tru", "length")


def test_a_stop_string_ends_a_constrained_answer() -> None:
    events = run(build_task(FakeMatcher(b"true"), stop="ru"))
    assert describe(events) == ("t", "stop")
    assert events[-1].stop_string == "ru"


def test_a_stop_string_that_may_still_begin_is_released_when_the_answer_is_complete() -> None:
    events = run(build_task(FakeMatcher(b"true"), stop="rue!", logprobs=True))
    assert describe(events) == ("true", "stop")
    assert [entry.token_id for event in events for entry in event.logprobs] == list(b"true")


def test_a_token_that_the_grammar_refuses_ends_the_task_with_the_error() -> None:
    task = build_task(FakeMatcher(b"true"))
    event = task.accept(SampledToken(ord("x")))
    assert event.finish_reason == "error"
    assert isinstance(event.error, GrammarError)
    assert task.is_done


def test_logits_that_are_not_finite_end_a_constrained_task_too() -> None:
    task = build_task(FakeMatcher(b"true"))
    (token,) = SamplingPipeline()(torch.full((1, VOCAB), math.nan), [task.sample_row()])
    event = task.accept(token)
    assert isinstance(event.error, NonFiniteLogitsError)


# The engine

SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": -5, "maximum": 120},
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["é", "x y", None]},
        "marks": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["age", "name", "kind", "marks"],
    "additionalProperties": False,
}


def random_model() -> ScriptedModel:
    """Its logits look random, of ASCII characters; what follows from a context is always the same."""
    return ScriptedModel(spread=7.0)


def random_params(rng: random.Random, **fields: Any) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0, 2.0]),
        top_k=rng.choice([0, 1, 20]),
        top_p=rng.choice([0.8, 1.0]),
        presence_penalty=rng.choice([0.0, 0.5]),
        seed=rng.randrange(2**32),
        logprobs=rng.random() < 0.5,
        **fields,
    )


def test_every_finished_answer_is_valid_under_its_schema() -> None:
    rng = random.Random(4)
    engine = build_engine(random_model())
    grammar = Grammar.json_schema(SCHEMA)
    handles = [
        engine.submit([rng.randrange(97, 123)], random_params(rng, grammar=grammar, max_tokens=400))
        for _ in range(24)
    ]
    for text, reason in finish(engine, handles):
        assert reason == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)
    assert_nothing_held(engine)


def test_an_answer_cut_by_its_length_is_the_begin_of_the_longer_one() -> None:
    def ask(max_tokens: int) -> tuple[str, str]:
        engine = build_engine(random_model())
        params = SamplingParams(seed=3, grammar=Grammar.json_schema(SCHEMA), max_tokens=max_tokens)
        return finish(engine, [engine.submit([97], params)])[0]

    whole, reason = ask(400)
    assert reason == "stop"
    assert ask(9) == (whole.encode()[:9].decode(), "length")


@pytest.mark.parametrize("n_tokens", [2048, 160], ids=["roomy", "tight"])
def test_answers_are_the_same_alone_in_a_batch_and_after_preemption(n_tokens: int) -> None:
    rng = random.Random(8)
    grammars = [None, Grammar.json_schema(SCHEMA), Grammar.regex("[a-f]{12,30}"), None]
    asked = [
        ([rng.randrange(97, 123)] * 5, random_params(rng, grammar=grammars[i % 4], max_tokens=60))
        for i in range(8)
    ]
    engine = build_engine(random_model(), n_tokens=n_tokens)
    together = finish(engine, [engine.submit(*each) for each in asked])
    assert (engine.get_stats()["preemptions"] > 0) == (n_tokens < 2048)
    for each, expected in zip(asked, together, strict=True):
        engine = build_engine(random_model())
        assert finish(engine, [engine.submit(*each)]) == [expected]


@pytest.mark.parametrize("source", ["[ab]{3}", "x(yz)?"])
def test_the_end_of_a_regular_expression_is_the_end_of_the_answer(source: str) -> None:
    engine = build_engine(random_model())
    fields: dict[str, Any] = {"grammar": Grammar.regex(source), "min_tokens": 50, "ignore_eos": True}
    handles = [engine.submit([97], SamplingParams(seed=seed, **fields)) for seed in range(6)]
    for text, reason in finish(engine, handles):
        assert reason == "stop"
        assert re.fullmatch(source, text)


def test_a_grammar_that_fails_in_the_middle_ends_its_task_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def start(self) -> SetMatcher:
            return SetMatcher([])

    monkeypatch.setattr(Intake, "compile", lambda *_: Broken())
    engine = build_engine(random_model())
    broken = engine.submit([97], SamplingParams(grammar=Grammar.regex("a"), max_tokens=5))
    healthy = engine.submit([98], SamplingParams(seed=1, max_tokens=5))
    answers = finish(engine, [healthy])
    (last,) = broken.take()
    assert isinstance(last.error, GrammarError)
    engine = build_engine(random_model())
    assert answers == finish(engine, [engine.submit([98], SamplingParams(seed=1, max_tokens=5))])
    assert_nothing_held(engine)
