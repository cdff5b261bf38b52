"""The log-probabilities of a prompt's own tokens, against a dense forward and a float64 log-softmax."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from astrai_triton.engine import SamplingParams, TaskHandle, TokenEvent
from astrai_triton.engine.logprobs import score_tokens
from astrai_triton.engine.result import TokenLogprob
from astrai_triton.engine.scoring import MAX_SCORED_ROWS, PromptScores, score_rows
from astrai_triton.errors import NonFiniteLogitsError
from astrai_triton.kvcache import KVCache
from astrai_triton.model import Decoder
from drive import answer, assert_nothing_held, build_engine, drain_events, finish, run_all
from fakes import VOCAB, Context, DistinctModel
from random_models import VARIANTS, dense_logits, random_decoder, small_config

Entry = TokenLogprob | None

SCORED = SamplingParams(temperature=0.0, max_tokens=6, logprobs=True, top_logprobs=3, prompt_logprobs=True)
TOLERANCE = 2e-4
"""Of float32 products of a chunk and of a whole prompt, where logits are of size 10."""


class CountingModel(DistinctModel):
    """Counts the rows of logits that it is asked for."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **({"spread": 7.0} | fields))
        self.num_logits: list[int] = []
        """Rows of logits of every forward."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        logits_rows: torch.Tensor,
    ) -> torch.Tensor:
        self.num_logits.append(len(logits_rows))
        return super().__call__(token_ids, positions, kv_cache, logits_rows)


def random_model(**changes: Any) -> Decoder:
    return random_decoder(small_config(vocab_size=VOCAB, max_seq_len=512, **changes))


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def oracle(logits: torch.Tensor, prompt: Sequence[int], num_top: int) -> list[Entry]:
    """From logits ``[len(prompt), V]``."""
    rows = torch.log_softmax(logits.double(), dim=1)
    entries: list[Entry] = [None]
    for row, token_id in zip(rows, prompt[1:], strict=False):
        order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[:num_top]
        entries.append(TokenLogprob(token_id, float(row[token_id]), tuple((i, float(row[i])) for i in order)))
    return entries


def decoder_oracle(model: Decoder, prompt: Sequence[int], num_top: int = 3) -> list[Entry]:
    return oracle(dense_logits(model, torch.tensor(prompt)), prompt, num_top)


def scripted_oracle(model: CountingModel, prompt: Sequence[int], num_top: int = 3) -> list[Entry]:
    contexts = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
    return oracle(torch.stack([model.logits_after(context) for context in contexts]), prompt, num_top)


def assert_scores(got: Sequence[Entry] | None, wanted: Sequence[Entry], tolerance: float = 1e-8) -> None:
    """1e-8: what rounding masses to 2^-32 of the largest leaves of a row of 260."""
    assert got is not None
    assert len(got) == len(wanted)
    assert got[0] is None
    for entry, other in zip(got[1:], wanted[1:], strict=True):
        assert entry is not None
        assert other is not None
        assert (entry.token_id, entry.offset) == (other.token_id, 0)
        assert entry.logprob == pytest.approx(other.logprob, abs=tolerance)
        assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in other.top]
        assert [value for _, value in entry.top] == pytest.approx(
            [value for _, value in other.top], abs=tolerance
        )


def take_scores(handle: TaskHandle) -> tuple[tuple[Entry, ...] | None, list[TokenEvent]]:
    """The scores in the first event, which no later one has, and all events."""
    events = drain_events(handle)
    assert all(event.prompt_logprobs is None for event in events[1:])
    return events[0].prompt_logprobs, events


# Right values


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_of_a_random_model_are_those_of_a_dense_forward(variant: str) -> None:
    model = random_model(**VARIANTS[variant])
    engine = build_engine(model, max_step_tokens=24)
    prompt = random_prompt(77)
    handle = engine.submit(prompt, SCORED)
    run_all(engine)
    scores, _ = take_scores(handle)
    assert_scores(scores, decoder_oracle(model, prompt), TOLERANCE)


@pytest.mark.parametrize(
    "sizes",
    [{}, {"n_tokens": None}, {"page_size": 1}, {"page_size": 256, "n_tokens": 1024}, {"policy": "fcfs"}],
    ids=["paged", "contiguous", "page-1", "page-256", "fcfs"],
)
def test_scores_are_right_in_every_cache_mode_and_chunking(sizes: dict[str, Any]) -> None:
    model = CountingModel()
    engine = build_engine(model, **sizes)
    prompts = [random_prompt(length, length) for length in (1, 2, 5, 130, 300)]
    handles = [engine.submit(prompt, SCORED) for prompt in prompts]
    run_all(engine)
    for handle, prompt in zip(handles, prompts, strict=True):
        assert_scores(take_scores(handle)[0], scripted_oracle(model, prompt))
    assert_nothing_held(engine)


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_as_many_alternatives_as_were_asked_for(num_top: int) -> None:
    model = CountingModel()
    engine = build_engine(model)
    prompt = random_prompt(30)
    params = SamplingParams(max_tokens=1, logprobs=True, top_logprobs=num_top, prompt_logprobs=True)
    handle = engine.submit(prompt, params)
    run_all(engine)
    scores, _ = take_scores(handle)
    assert_scores(scores, scripted_oracle(model, prompt, num_top))
    assert scores is not None
    assert {len(entry.top) for entry in scores if entry is not None} == {num_top}


def test_alternatives_of_equal_logits_are_in_the_order_of_their_ids() -> None:
    logits = torch.zeros(2, 700)
    logits[1, [650, 3, 300]] = 2.0
    entries = score_rows(logits, [5, 3], 4)
    assert [token_id for token_id, _ in entries[0].top] == [0, 1, 2, 3]
    assert [token_id for token_id, _ in entries[1].top] == [3, 300, 650, 0]
    assert entries[0].logprob == pytest.approx(-math.log(700))


def test_a_token_that_cannot_come_has_a_finite_log_probability() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 3] = -math.inf
    assert score_rows(logits, [3], 0) == [TokenLogprob(3, -9999.0)]


def test_rows_of_a_large_vocabulary_are_scored_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(MAX_SCORED_ROWS, 1000, generator=torch.Generator().manual_seed(0))
    ids = [13 * i % 1000 for i in range(MAX_SCORED_ROWS)]
    expected = oracle(logits, [0, *ids], 2)[1:]
    monkeypatch.setattr("astrai_triton.engine.scoring._MAX_LOGITS", 7000)
    sizes: list[int] = []

    def note(rows: torch.Tensor, ids: torch.Tensor, num_top: int) -> torch.Tensor:
        sizes.append(len(rows))
        return score_tokens(rows, ids, num_top)

    monkeypatch.setattr("astrai_triton.engine.scoring.score_tokens", note)
    assert_scores([None, *score_rows(logits, ids, 2)], [None, *expected])
    assert max(sizes) == 7
    assert sum(sizes) == MAX_SCORED_ROWS


# When and where they come


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_the_first_event_has_them_even_if_nothing_is_sampled(max_tokens: int) -> None:
    model = CountingModel()
    engine = build_engine(model)
    prompt = random_prompt(50)
    handle = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=True))
    run_all(engine)
    scores, events = take_scores(handle)
    assert_scores(scores, scripted_oracle(model, prompt, 0))
    assert (len(events), events[-1].finish_reason) == (max(1, max_tokens), "length")
    assert events[-1].completion_tokens == max_tokens


def test_nobody_gets_them_unasked() -> None:
    engine = build_engine(CountingModel())
    handle = engine.submit(random_prompt(20), SamplingParams(max_tokens=3, logprobs=True))
    run_all(engine)
    assert take_scores(handle)[0] is None


def test_a_callback_is_given_them() -> None:
    seen: list[TokenEvent] = []
    engine = build_engine(CountingModel())
    engine.submit(random_prompt(20), SCORED, callback=seen.append)
    run_all(engine)
    assert [event.prompt_logprobs is not None for event in seen] == [True] + [False] * 5


# The cache


def test_a_warm_cache_is_not_read_and_filled_all_the_same() -> None:
    model = CountingModel()
    engine = build_engine(model)
    prompt = random_prompt(61)
    for _ in range(2):
        handle = engine.submit(prompt, SCORED)
        run_all(engine)
        scores, events = take_scores(handle)
        assert_scores(scores, scripted_oracle(model, prompt))
        assert {handle.cached_tokens, *(event.cached_tokens for event in events)} == {0}
    plain = engine.submit(prompt, SamplingParams(max_tokens=1))
    run_all(engine)
    assert plain.cached_tokens == 60
    assert_nothing_held(engine)


def test_scores_are_complete_after_a_preemption_in_the_middle_of_the_prompt() -> None:
    model = CountingModel()
    engine = build_engine(model, n_tokens=144, max_step_tokens=12)
    older = [engine.submit([97 + i] * 3, SamplingParams(max_tokens=30, seed=1)) for i in range(4)]
    engine.step()
    prompt = random_prompt(100)
    handle = engine.submit(prompt, SCORED)
    while not engine.get_stats()["preemptions"]:
        engine.step()
        assert not drain_events(handle)
    assert handle.has_started
    run_all(engine)
    assert_scores(take_scores(handle)[0], scripted_oracle(model, prompt))
    assert [drain_events(other)[-1].finish_reason for other in older] == ["length"] * 4
    assert_nothing_held(engine)


def test_scores_are_told_once_when_the_answer_is_preempted() -> None:
    model = CountingModel()
    engine = build_engine(model, n_tokens=48)
    prompts = [random_prompt(10, i) for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=30, prompt_logprobs=True)
    handles = [engine.submit(prompt, params) for prompt in prompts]
    run_all(engine)
    assert engine.get_stats()["preemptions"] > 0
    for handle, prompt in zip(handles, prompts, strict=True):
        scores, events = take_scores(handle)
        assert_scores(scores, scripted_oracle(model, prompt, 0))
        assert len(events) == 30


def test_choices_share_the_scores_of_their_prompt() -> None:
    model = CountingModel()
    engine = build_engine(model)
    prompt = random_prompt(100)
    handles = engine.submit_many([prompt], SCORED, n=3)
    run_all(engine)
    for handle in handles:
        assert_scores(take_scores(handle)[0], scripted_oracle(model, prompt))
    assert model.num_logits[0] == 100
    assert model.forwards[2] == (4, 4)
    assert model.num_logits[2] == 2


@pytest.mark.parametrize("cancel_at", [0, 1, 4])
def test_choices_score_their_prompt_themselves_when_the_first_is_cancelled(cancel_at: int) -> None:
    model = CountingModel()
    engine = build_engine(model, max_step_tokens=16)
    prompt = random_prompt(100)
    leader, *followers = engine.submit_many([prompt], SCORED, n=3)
    for _ in range(cancel_at):
        engine.step()
    leader.cancel()
    run_all(engine)
    assert take_scores(leader)[0] is None
    for handle in followers:
        assert_scores(take_scores(handle)[0], scripted_oracle(model, prompt))
    assert_nothing_held(engine)


# Others in the same step


def test_tasks_beside_a_scored_prompt_are_not_touched_by_it() -> None:
    prompts = [bytes([97 + i] * (7 * i + 1)) for i in range(5)]
    solo = [answer(build_engine(CountingModel()), prompt, max_tokens=20) for prompt in prompts]
    model = CountingModel()
    engine = build_engine(model, max_step_tokens=40)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    handles = [engine.submit(list(prompt), params) for prompt in prompts[:3]]
    engine.step()
    scored_prompt = random_prompt(200)
    scored = engine.submit(scored_prompt, SCORED)
    handles += [engine.submit(list(prompt), params) for prompt in prompts[3:]]
    assert [text for text, _ in finish(engine, handles)] == solo
    assert_scores(take_scores(scored)[0], scripted_oracle(model, scored_prompt))


def test_the_rows_of_logits_of_a_step_are_bounded_and_shared_out_evenly() -> None:
    model = CountingModel()
    engine = build_engine(model, max_step_tokens=512)
    long = [engine.submit(random_prompt(400, i), SCORED) for i in range(3)]
    short = engine.submit(random_prompt(12), SCORED)
    plain = engine.submit(random_prompt(90), SamplingParams(max_tokens=8))
    engine.step()
    assert take_scores(short)[0] is not None
    assert drain_events(plain)
    run_all(engine)
    assert max(model.num_logits) <= MAX_SCORED_ROWS + 8
    assert all(take_scores(handle)[0] is not None for handle in long)
    num_scored = 3 * 399 + 11
    assert sum(rows > 8 for rows in model.num_logits) == math.ceil(num_scored / MAX_SCORED_ROWS)


# Faults


def test_logits_that_are_not_finite_end_the_task_they_belong_to() -> None:
    class PoisonedModel(CountingModel):
        def logits_after(self, context: Context) -> torch.Tensor:
            logits = super().logits_after(context)
            if len(context) == 13 and context[0] == 66:
                logits[5] = math.nan
            return logits

    engine = build_engine(PoisonedModel(), max_step_tokens=64)
    bad = engine.submit([66] * 20, SCORED)
    good = engine.submit([67] * 20, SCORED)
    run_all(engine)
    (event,) = drain_events(bad)
    assert isinstance(event.error, NonFiniteLogitsError)
    assert event.prompt_logprobs is None
    assert_scores(take_scores(good)[0], scripted_oracle(CountingModel(), [67] * 20))
    assert_nothing_held(engine)


def test_a_forward_that_fails_once_is_repeated_without_a_gap() -> None:
    faults = [RuntimeError("injected"), RuntimeError("injected")]

    def explode(contexts: list[Context]) -> None:
        if faults and len(contexts) > 1 and max(map(len, contexts)) > 30:
            raise faults.pop()

    model = CountingModel(on_forward=explode)
    engine = build_engine(model, max_step_tokens=24)
    prompts = [random_prompt(70, i) for i in range(2)]
    handles = [engine.submit(prompt, SCORED) for prompt in prompts]
    run_all(engine)
    assert not faults
    for handle, prompt in zip(handles, prompts, strict=True):
        assert_scores(take_scores(handle)[0], scripted_oracle(model, prompt))


def test_the_rows_that_a_chunk_scores_follow_those_that_are_known() -> None:
    scores = PromptScores(10)
    assert (scores.num_known, scores.is_complete) == (1, False)
    assert scores.select_rows(0, 4) == range(4)
    scores.add([TokenLogprob(1, -1.0)] * 4)
    assert scores.select_rows(0, 4) == range(4, 4)
    assert scores.select_rows(2, 7) == range(4, 7)
    assert scores.select_rows(4, 10) == range(4, 9)
    scores.add([TokenLogprob(1, -1.0)] * 5)
    assert scores.is_complete
    assert not scores.select_rows(8, 12)
    assert PromptScores(1).is_complete
