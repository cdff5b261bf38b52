"""10 000 pairs of answers, one alone from a cold cache and one under some other circumstance: equal in every
token, character, reason and bit of log-probability.

The scripted model reads its context back from the KV cache and computes each row by itself, so whatever
differs here is the engine's doing. What batches do to the products of a real model is measured in
``end_to_end/test_exactness.py``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest

from astrai_triton.engine import InferenceEngine, TaskHandle
from astrai_triton.engine.task import Task
from random_requests import (
    Answer,
    Request,
    answer_alone,
    build_scripted,
    draw_requests,
    read_answer,
    run_until_idle,
)

pytestmark = pytest.mark.timeout(900)

NUM_REQUESTS = 2000
"""Five other circumstances each."""
BATCH = 16

Pair = tuple[Request, Answer]


@attrs.frozen
class Alone:
    """What one engine answered to each request, when it had nothing else to do."""

    cold: list[Pair]
    warm: list[tuple[Answer, int]]
    """The same right after, and how many tokens of the prompt were cached then."""


@pytest.fixture(scope="module")
def answered() -> Alone:
    engine = build_scripted(n_tokens=128)
    answers = Alone([], [])
    for request in draw_requests(random.Random(0), NUM_REQUESTS):
        engine.pool.reset_prefixes()
        answer, num_cached = answer_alone(engine, request)
        assert num_cached == 0
        answers.cold.append((request, answer))
        answers.warm.append(answer_alone(engine, request))
    return answers


@pytest.fixture(scope="module")
def alone(answered: Alone) -> list[Pair]:
    """Requests, and the answer of each alone from a cold cache."""
    return answered.cold


def batches_of(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    return (pairs[start : start + BATCH] for start in range(0, len(pairs), BATCH))


def assert_equal_together(
    engine: InferenceEngine, pairs: Sequence[Pair], salts: Sequence[str | None]
) -> None:
    """Submit all at once, run, and compare."""
    handles = [
        engine.submit(request.prompt, request.params, salt=salt, request_id=str(id(request)))
        for (request, _), salt in zip(pairs, salts, strict=True)
    ]
    run_until_idle(engine)
    for handle, (request, expected) in zip(handles, pairs, strict=True):
        assert read_answer(handle.take()) == expected, request


def test_the_requests_are_of_every_kind(alone: list[Pair]) -> None:
    reasons = Counter((answer.reason, answer.stop_string is not None) for _, answer in alone)
    assert reasons["stop", False] > 50
    assert reasons["stop", True] > 30
    assert reasons["length", False] > 500
    assert sum("é" in answer.text for _, answer in alone) > 10
    assert sum("\ufffd" in answer.text for _, answer in alone) > 10
    assert len({answer.text for _, answer in alone}) > 0.7 * len(alone)


def test_from_a_warm_cache(answered: Alone) -> None:
    for (request, expected), (answer, num_cached) in zip(answered.cold, answered.warm, strict=True):
        assert answer == expected, request
        assert num_cached == (len(request.prompt) - 1) // 4 * 4


@pytest.mark.parametrize(
    "sizes",
    [{}, {"page_size": 1}, {"n_tokens": None}, {"prefix_cache": False}],
    ids=["paged", "page-1", "contiguous", "unshared"],
)
def test_in_a_batch(alone: list[Pair], sizes: dict[str, Any]) -> None:
    """A quarter of the requests in each mode of the cache, whole prompts at once."""
    engine = build_scripted(max_batch_size=BATCH, max_step_tokens=1024, **sizes)
    quarter = len(alone) // 4
    start = (
        quarter * ["page_size", "n_tokens", "prefix_cache"].index(next(iter(sizes))) if sizes else 3 * quarter
    )
    for pairs in batches_of(alone[start : start + quarter]):
        assert_equal_together(engine, pairs, [None] * len(pairs))


@pytest.mark.parametrize("policy", ["budget", "fcfs"])
def test_in_chunks_beside_others(alone: list[Pair], policy: str) -> None:
    """Half of the requests under each policy: prompts in chunks, beside decodes, in two salts."""
    rng = random.Random(1)
    engine = build_scripted(max_batch_size=BATCH, max_step_tokens=20, policy=policy)
    half = len(alone) // 2
    for pairs in batches_of(alone[:half] if policy == "budget" else alone[half:]):
        engine.pool.reset_prefixes()
        assert_equal_together(engine, pairs, [rng.choice([None, "s"]) for _ in pairs])
    assert sum(sum(q_lens) > len(q_lens) > 1 for q_lens in engine.model.forwards) > 500


@pytest.mark.parametrize("page_size", [4, 1])
def test_after_preemption(alone: list[Pair], page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the requests at each page size, in a pool that holds little more than the largest of them."""
    engine = build_scripted(page_size=page_size, n_tokens=60, max_batch_size=BATCH, max_step_tokens=32)
    preempted = record_preempted(engine, monkeypatch)
    half = len(alone) // 2
    for pairs in batches_of(alone[:half] if page_size == 1 else alone[half:]):
        assert_equal_together(engine, pairs, [None] * len(pairs))
    assert len(set(preempted)) > 0.3 * half


def record_preempted(engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tasks that are preempted from now on."""
    stepper, preempted = engine._scheduler._stepper, []
    preempt = stepper._preempt

    def record(task: Task) -> None:
        preempted.append(task.handle.id)
        preempt(task)

    monkeypatch.setattr(stepper, "_preempt", record)
    return preempted


def test_arriving_beside_tasks_that_come_and_go(alone: list[Pair]) -> None:
    """Tasks join at any step, others are cancelled at any step, and at times the pool runs out."""
    rng = random.Random(2)
    engine = build_scripted(n_tokens=160, max_batch_size=8, max_step_tokens=48)
    open_pairs: list[tuple[TaskHandle, Pair]] = []
    for pair in alone:
        request, _ = pair
        open_pairs.append((engine.submit(request.prompt, request.params), pair))
        if rng.random() < 0.3:
            other, _ = rng.choice(alone)
            victim = engine.submit(other.prompt, other.params)
            for _ in range(rng.randint(0, 6)):
                engine.step()
            victim.cancel()
        for _ in range(rng.randint(0, 4)):
            engine.step()
    run_until_idle(engine)
    for handle, (request, expected) in open_pairs:
        assert read_answer(handle.take()) == expected, request
