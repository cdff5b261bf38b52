"""Several choices of a prompt: it is computed once, and whatever happens to the first, the others go on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from astrai_triton.engine import InferenceEngine, SamplingParams, TaskHandle
from astrai_triton.engine.task import Task
from astrai_triton.errors import ContextLengthError, EngineUnavailableError, QueueFullError
from drive import answer, assert_nothing_held, build_engine, drain_events, finish, run_all
from fakes import EOS, Context, ScriptedModel, echo_script

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(temperature=1.0, max_tokens=12, seed=40)
PROMPT = [97 + i % 26 for i in range(100)]


def reasons(handles: Sequence[TaskHandle]) -> list[str | None]:
    """How tasks ended; None: not yet, or that was read before."""
    ends = [drain_events(handle) for handle in handles]
    return [events[-1].finish_reason if events else None for events in ends]


def has_started(handles: Sequence[TaskHandle]) -> list[bool]:
    return [handle.has_started for handle in handles]


# What is shared


def test_the_pages_of_a_prompt_are_computed_once_for_all_its_choices() -> None:
    model = ScriptedModel()
    engine = build_engine(model)
    handles = engine.submit_many([PROMPT], GREEDY, n=4)
    run_all(engine)
    # The leader's prompt, its decode, then the page with the last prompt token, which is never shared.
    assert model.forwards[:3] == [(100,), (1,), (4, 4, 4)]
    assert sum(sum(q_lens) for q_lens in model.forwards) == 100 + 3 * 4 + 4 * 11
    assert [handle.cached_tokens for handle in handles] == [0, 96, 96, 96]
    assert_nothing_held(engine)


@pytest.mark.parametrize("sizes", [{}, {"max_batch_size": 1}, {"max_step_tokens": 16}, {"n_tokens": 128}])
def test_the_text_of_choice_j_is_the_solo_text_of_seed_plus_j(sizes: dict[str, int]) -> None:
    prompts = [PROMPT, list(b"short"), PROMPT[:9]]
    solo = [
        answer(
            build_engine(ScriptedModel(spread=7.0)), bytes(prompt), temperature=1.0, max_tokens=12, seed=seed
        )
        for prompt in prompts
        for seed in (40, 41, 42)
    ]
    assert len(set(solo)) == 9
    engine = build_engine(ScriptedModel(spread=7.0), **sizes)
    assert finish(engine, engine.submit_many(prompts, SEEDED, n=3)) == [(text, "length") for text in solo]
    assert_nothing_held(engine)


def test_greedy_choices_are_identical() -> None:
    engine = build_engine()
    answers = finish(engine, engine.submit_many([PROMPT], GREEDY, n=5))
    assert answers == [(answer(build_engine(), bytes(PROMPT), max_tokens=12), "length")] * 5


def test_choices_without_a_seed_differ() -> None:
    engine = build_engine(ScriptedModel(spread=7.0))
    params = SamplingParams(temperature=1.0, max_tokens=12)
    assert len(set(finish(engine, engine.submit_many([PROMPT], params, n=4)))) == 4


@pytest.mark.parametrize(
    ("sizes", "prompt"),
    [
        ({"n_tokens": None}, PROMPT),
        ({"prefix_cache": False}, PROMPT),
        ({"page_size": 1}, PROMPT),
        ({}, PROMPT[:4]),
    ],
    ids=["contiguous", "unshared", "page-1", "one-page"],
)
def test_where_nothing_can_be_shared_all_choices_start_at_once(
    sizes: dict[str, Any], prompt: list[int]
) -> None:
    model = ScriptedModel()
    engine = build_engine(model, **sizes)
    handles = engine.submit_many([prompt], GREEDY, n=3)
    engine.step()
    assert model.forwards[0] == (len(prompt),) * 3
    assert len(set(finish(engine, handles))) == 1


def test_a_prompt_that_is_only_warmed_up_is_computed_once() -> None:
    model = ScriptedModel()
    engine = build_engine(model)
    handles = engine.submit_many([PROMPT], SamplingParams(max_tokens=0), n=3)
    assert finish(engine, handles) == [("", "length")] * 3
    assert model.forwards == [(100,), (4, 4)]


def test_a_leader_that_ends_with_its_first_token_leaves_its_pages_to_the_others() -> None:
    model = ScriptedModel(lambda context: EOS)
    engine = build_engine(model)
    assert finish(engine, engine.submit_many([PROMPT], GREEDY, n=3)) == [("", "stop")] * 3
    assert model.forwards == [(100,), (4, 4)]


# What may happen to the leader


@pytest.mark.parametrize("cancel_at", range(10))
def test_followers_answer_whenever_the_leader_is_cancelled(cancel_at: int) -> None:
    engine = build_engine(ScriptedModel(spread=7.0), max_step_tokens=16, max_batch_size=3)
    leader, *followers = engine.submit_many([PROMPT], SEEDED, n=4)
    for _ in range(cancel_at):
        engine.step()
    leader.cancel()
    engine.step()
    assert drain_events(leader)[-1].finish_reason == "cancelled"
    solo = build_engine(ScriptedModel(spread=7.0))
    expected = [solo.submit(PROMPT, SamplingParams(max_tokens=12, seed=41 + j)) for j in range(3)]
    assert finish(engine, followers) == finish(solo, expected)
    assert_nothing_held(engine)


def test_followers_answer_when_the_leader_fails() -> None:
    faults = [RuntimeError("injected")]

    def explode(contexts: list[Context]) -> None:
        if faults:
            raise faults.pop()

    engine = build_engine(ScriptedModel(on_forward=explode))
    leader, *followers = engine.submit_many([PROMPT], GREEDY, n=3)
    text = answer(build_engine(), bytes(PROMPT), max_tokens=12)
    assert finish(engine, followers) == [(text, "length")] * 2
    assert reasons([leader]) == ["error"]
    assert_nothing_held(engine)


def test_followers_of_a_leader_that_cannot_start_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine()
    open_lease, calls = engine.pool.open, []

    def fail_once(*args: Any) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("injected")
        return open_lease(*args)

    monkeypatch.setattr(engine.pool, "open", fail_once)
    leader, *followers = engine.submit_many([PROMPT], GREEDY, n=3)
    assert [reason for _, reason in finish(engine, followers)] == ["length"] * 2
    assert reasons([leader]) == ["error"]


def test_followers_wait_for_a_leader_that_is_preempted_before_its_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build_engine(ScriptedModel(spread=7.0), n_tokens=144, max_step_tokens=12)
    stepper, preempted = engine._scheduler._stepper, list[str]()
    preempt = stepper._preempt

    def note(task: Task) -> None:
        assert not task.num_generated or task.handle.id != "many-0"
        preempted.append(task.handle.id)
        preempt(task)

    monkeypatch.setattr(stepper, "_preempt", note)
    older = engine.submit_many([[97 + i] * 3 for i in range(4)], SamplingParams(max_tokens=30, seed=1))
    engine.step()
    handles = engine.submit_many([PROMPT], SEEDED, n=3, request_id="many")
    while "many-0" not in preempted:
        assert has_started(handles[1:]) == [False, False]
        engine.step()
    while not drain_events(handles[0]):
        assert has_started(handles[1:]) == [False, False]
        engine.step()
    run_all(engine)
    assert reasons(handles[1:]) == ["length"] * 2
    assert handles[1].cached_tokens > 0
    assert reasons(older) == ["length"] * 4
    assert_nothing_held(engine)


# Who waits for whom


def test_held_choices_are_in_nobodys_way() -> None:
    engine = build_engine(max_step_tokens=16, max_batch_size=2, max_overtaken=0)
    handles = engine.submit_many([PROMPT], GREEDY, n=6)
    later = engine.submit([120], SamplingParams(temperature=0.0, max_tokens=2))
    engine.step()
    engine.step()
    assert reasons([later]) == ["length"]
    assert has_started(handles) == [True] + [False] * 5
    finish(engine, handles)


def test_released_choices_come_before_what_arrived_after_them() -> None:
    engine = build_engine(max_step_tokens=64, max_batch_size=2)
    handles = engine.submit_many([PROMPT], SamplingParams(temperature=0.0, max_tokens=4), n=3)
    blocker = engine.submit([120], SamplingParams(temperature=0.0, max_tokens=4))
    later = [engine.submit([121], GREEDY) for _ in range(4)]
    while not handles[2].has_started:
        assert not any(has_started(later))
        engine.step()
    finish(engine, [*handles, blocker, *later])


def test_choices_of_one_key_do_not_keep_another_key_waiting() -> None:
    engine = build_engine(max_batch_size=2)
    many = engine.submit_many([PROMPT], GREEDY, n=20, key="many")
    single = engine.submit([120], GREEDY, key="one")
    for _ in range(2 * 12 + 4):
        engine.step()
    assert reasons([single]) == ["length"]
    assert sum(has_started(many)) < 6
    finish(engine, many)
    assert_nothing_held(engine)


def test_held_choices_count_as_waiting() -> None:
    engine = build_engine(max_queue=4)
    handles = engine.submit_many([PROMPT], SamplingParams(max_tokens=50), n=4)
    assert engine.get_stats()["waiting_queue"] == 4
    engine.step()
    assert engine.get_stats()["waiting_queue"] == 3
    engine.submit([97], GREEDY)
    with pytest.raises(QueueFullError):
        engine.submit([97], GREEDY)
    run_all(engine)
    assert reasons(handles) == ["length"] * 4


def test_a_held_choice_that_is_cancelled_ends_without_starting() -> None:
    engine = build_engine(max_step_tokens=16)
    handles = engine.submit_many([PROMPT], GREEDY, n=3)
    engine.step()
    handles[1].cancel()
    engine.step()
    assert reasons(handles) == [None, "cancelled", None]
    assert not handles[1].has_started
    assert engine.get_stats()["waiting_queue"] == 1
    assert [reason for _, reason in finish(engine, [handles[0], handles[2]])] == ["length"] * 2
    assert_nothing_held(engine)


# The ends of everything


def test_a_drain_waits_for_held_choices() -> None:
    with build_engine(start=True) as engine:
        handles = engine.submit_many([PROMPT, PROMPT[:50]], GREEDY, n=4)
        assert engine.drain(30)
        assert reasons(handles) == ["length"] * 8
        with pytest.raises(EngineUnavailableError):
            engine.submit_many([PROMPT], GREEDY, n=2)


def test_a_shutdown_ends_held_choices_as_cancelled() -> None:
    engine = build_engine(max_step_tokens=16)
    handles = engine.submit_many([PROMPT], GREEDY, n=3)
    engine.step()
    engine.shutdown()
    assert reasons(handles) == ["cancelled"] * 3
    assert engine.get_stats()["waiting_queue"] == 0
    assert_nothing_held(engine)


def test_a_step_that_fails_ends_held_choices_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(max_step_tokens=16)
    handles = engine.submit_many([PROMPT], GREEDY, n=3)
    engine.step()

    def explode() -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler._stepper, "_refill", explode)
        engine._scheduler._try_step()
    assert reasons(handles) == ["error"] * 3
    assert engine.drain(0)
    assert_nothing_held(engine)


# Admission


def test_all_are_accepted_or_none() -> None:
    engine = build_engine(max_queue=5)
    first = engine.submit_many([PROMPT], GREEDY, n=2)
    with pytest.raises(QueueFullError) as caught:
        engine.submit_many([PROMPT, PROMPT], GREEDY, n=2)
    assert (caught.value.depth, engine.get_stats()["total_tasks"]) == (2, 2)
    second = engine.submit_many([PROMPT], GREEDY, n=3)
    assert [reason for _, reason in finish(engine, [*first, *second])] == ["length"] * 5


def test_more_tasks_than_the_queue_ever_holds_are_a_bad_argument() -> None:
    engine = build_engine(max_queue=5)
    with pytest.raises(ValueError, match=r"n, prompts: wanted at most 5 .*got 2 choices of 3 prompts"):
        engine.submit_many([[97], [98], [99]], GREEDY, n=2)
    assert engine.get_stats()["waiting_queue"] == 0


@pytest.mark.parametrize(
    ("prompts", "n", "error", "text"),
    [
        ([[97], []], 1, ValueError, r"prompts\[1\]: wanted at least one token"),
        ([[97], [260]], 2, ValueError, r"prompts\[1\]: wanted ids in 0..259, got 260"),
        ([97, 98], 1, TypeError, r"prompts\[0\]: wanted a sequence of token ids, got 97"),
        ([], 1, ValueError, "prompts: wanted at least one, got none"),
        ([[97]], 0, ValueError, "n: wanted >= 1, got 0"),
        ([[97]], True, TypeError, "n: wanted an integer, got True"),
        ([[97], [97] * 600], 2, ContextLengthError, "maximum context length is 512"),
    ],
)
def test_one_bad_prompt_refuses_the_call(prompts: Any, n: Any, error: type[Exception], text: str) -> None:
    engine = build_engine()
    with pytest.raises(error, match=text):
        engine.submit_many(prompts, GREEDY, n=n)
    assert engine.get_stats()["total_tasks"] == 0


def test_tasks_come_back_by_prompt_then_choice_and_are_numbered_in_logs() -> None:
    engine = build_engine(ScriptedModel(echo_script("ab", 1)))
    handles = engine.submit_many([[97], [98, 99]], GREEDY, n=2, request_id="r")
    assert [(handle.id, handle.prompt_len) for handle in handles] == [
        ("r-0", 1),
        ("r-1", 1),
        ("r-2", 2),
        ("r-3", 2),
    ]
    (single,) = engine.submit_many([[97]], GREEDY, request_id="r")
    assert single.id == "r"
    run_all(engine)


def test_calls_of_many_threads_each_come_whole() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    answers: list[list[str | None]] = []

    def ask(engine: InferenceEngine, first: int) -> None:
        for i in range(10):
            handles = engine.submit_many([[first, *PROMPT[: 5 + i]]], params, n=3)
            ends = [list(handle.iter_events())[-1].finish_reason for handle in handles]
            answers.append(ends)

    with build_engine(start=True) as engine:
        threads = [threading.Thread(target=ask, args=(engine, 97 + i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert engine.drain(10)
        assert_nothing_held(engine)
    assert answers == [["length"] * 3] * 40
