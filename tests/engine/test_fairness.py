"""Who is served when keys, sizes and pages compete."""

from __future__ import annotations

import random

import pytest

from astrai_triton.engine import SamplingParams, TaskHandle
from drive import answer, assert_nothing_held, build_engine, drain_events, finish, run_all
from fakes import ScriptedModel


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def test_a_key_with_one_request_does_not_wait_for_the_backlog_of_another() -> None:
    engine = build_engine(max_batch_size=2)
    backlog = [engine.submit([97 + i], greedy(8), key="many") for i in range(20)]
    single = engine.submit([120], greedy(8), key="one")
    # Two of the backlog may run already; the next place is for the other key.
    for _ in range(2 * 8 + 4):
        engine.step()
    assert any(event.finish_reason for event in drain_events(single))
    assert sum(handle.cached_tokens == 0 and bool(handle._events) for handle in backlog) < 6
    run_all(engine)
    assert_nothing_held(engine)


def test_keys_get_equal_shares_of_tokens_however_many_requests_they_have() -> None:
    engine = build_engine(max_batch_size=4)
    tokens = {"a": 0, "b": 0}
    handles = [("a", engine.submit([97 + i % 26], greedy(10), key="a")) for i in range(60)]
    handles += [("b", engine.submit([97 + i % 26], greedy(30), key="b")) for i in range(20)]
    for _ in range(150):
        engine.step()
    for key, handle in handles:
        tokens[key] += sum(event.token_id is not None for event in drain_events(handle))
    assert 0.8 < tokens["a"] / tokens["b"] < 1.25
    run_all(engine)


def test_a_short_request_passes_one_that_does_not_fit_yet() -> None:
    engine = build_engine(n_tokens=64, max_batch_size=4)
    running = engine.submit([97] * 20, greedy(20))
    engine.step()
    large = engine.submit([98] * 50, greedy(4))
    small = engine.submit([99] * 3, greedy(4))
    for _ in range(5):
        engine.step()
    assert [event.finish_reason for event in drain_events(small)][-1] == "length"
    assert not drain_events(large)
    finish(engine, [running, large])
    assert_nothing_held(engine)


def test_a_large_request_is_overtaken_only_so_often() -> None:
    engine = build_engine(n_tokens=64, max_batch_size=4, max_overtaken=5)
    rng = random.Random(0)

    def submit_small() -> TaskHandle:
        return engine.submit([rng.randrange(97, 123) for _ in range(6)], greedy(rng.randrange(6, 12)))

    small = [submit_small() for _ in range(4)]
    engine.step()
    large = engine.submit([98] * 56, greedy(4))
    num_before = 0
    for _ in range(400):
        # Somebody small always waits.
        if engine.get_stats()["waiting_queue"] < 3:
            small.append(submit_small())
        engine.step()
        if large.has_started:
            break
        num_before = len(small)
    assert large.has_started
    # Four ran already; at most five passed, and three waited behind.
    assert num_before <= 4 + 5 + 3
    run_all(engine)
    assert_nothing_held(engine)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_pool_of_ten_pages_finishes_forty_tasks_as_if_each_were_alone(page_size: int) -> None:
    rng = random.Random(1)
    prompts = [
        bytes(rng.randrange(97, 123) for _ in range(rng.randrange(1, 5 * page_size))) for _ in range(40)
    ]
    limits = [rng.randrange(1, 4 * page_size + 1) for _ in prompts]
    solo = [
        answer(build_engine(), prompt, max_tokens=limit)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    engine = build_engine(page_size=page_size, n_tokens=10 * page_size, max_step_tokens=64)
    handles = [
        engine.submit(list(prompt), greedy(limit)) for prompt, limit in zip(prompts, limits, strict=True)
    ]
    assert finish(engine, handles) == [(text, "length") for text in solo]
    assert_nothing_held(engine)
    computed = sum(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    assert engine.get_stats()["recomputed_tokens"] <= 0.3 * computed


def test_first_come_first_served_prefills_one_prompt_after_the_other() -> None:
    model = ScriptedModel()
    engine = build_engine(model, max_step_tokens=64, policy="fcfs")
    long = engine.submit([97] * 200, greedy(2))
    short = engine.submit([98] * 5, greedy(2))
    engine.step()
    assert model.forwards == [(64,)]
    finish(engine, [long, short])


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="policy: wanted one of budget, fcfs, got 'lifo'"):
        build_engine(policy="lifo")
