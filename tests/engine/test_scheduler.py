from __future__ import annotations

import random
import threading
from collections import deque

import pytest

from astrai_triton.engine import SamplingParams, TaskHandle
from astrai_triton.engine.task import Task
from astrai_triton.errors import (
    ContextLengthError,
    EngineUnavailableError,
    PoolTooSmallError,
    QueueFullError,
)
from drive import answer, assert_nothing_held, build_engine, drain_events, finish, run_all
from fakes import EOS, ScriptedModel, echo_script

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def prompts_of_all_lengths(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97, 123) for _ in range(3 * i + 1)] for i in range(count)]


def test_sixteen_prompts_of_sixteen_lengths_are_one_ragged_forward() -> None:
    model = ScriptedModel()
    engine = build_engine(model, max_batch_size=16)
    prompts = prompts_of_all_lengths(16)
    for prompt in prompts:
        engine.submit(prompt, GREEDY)
    engine.step()
    assert sorted(model.forwards[0]) == sorted(map(len, prompts))
    assert model.forwards[1] == (1,) * 16
    run_all(engine)
    assert len(model.forwards) == 24


def test_short_prompts_do_not_wait_for_a_long_prefill() -> None:
    engine = build_engine(max_batch_size=16, max_step_tokens=64)
    long = engine.submit([97] * 400, GREEDY)
    short = [engine.submit([98 + i] * 5, GREEDY) for i in range(10)]
    engine.step()
    engine.step()
    assert all(drain_events(handle) for handle in short)
    assert not drain_events(long)
    finish(engine, [long])


def test_a_decoding_task_gets_a_token_in_every_step_beside_prefills() -> None:
    engine = build_engine(max_batch_size=4, max_step_tokens=32)
    decoding = engine.submit([97], SamplingParams(temperature=0.0, max_tokens=60))
    engine.step()
    drain_events(decoding)
    for i in range(3):
        engine.submit([98 + i] * 200, GREEDY)
    for _ in range(12):
        engine.step()
        assert len(drain_events(decoding)) == 1
    run_all(engine)


@pytest.mark.parametrize("sizes", [{}, {"n_tokens": None}, {"page_size": 1}, {"prefix_cache": False}])
def test_text_alone_and_in_a_batch_is_the_same_in_every_cache_mode(sizes: dict[str, int | None]) -> None:
    prompts = prompts_of_all_lengths(8)
    solo = [answer(build_engine(**sizes), bytes(prompt)) for prompt in prompts]
    engine = build_engine(**sizes)
    batched = finish(engine, [engine.submit(prompt, GREEDY) for prompt in prompts])
    assert [text for text, _ in batched] == solo
    assert all(len(text) == 24 for text in solo)
    assert_nothing_held(engine)


def test_a_seed_gives_the_same_text_alone_batched_and_preempted() -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
    prompts = prompts_of_all_lengths(6)

    def solo(prompt: list[int]) -> str:
        engine = build_engine(ScriptedModel(spread=7.0))
        return finish(engine, [engine.submit(prompt, params)])[0][0]

    expected = [solo(prompt) for prompt in prompts]
    assert expected != [answer(build_engine(), bytes(prompt)) for prompt in prompts]
    roomy = build_engine(ScriptedModel(spread=7.0))
    assert [text for text, _ in finish(roomy, [roomy.submit(p, params) for p in prompts])] == expected
    tight = build_engine(ScriptedModel(spread=7.0), n_tokens=48)
    assert [text for text, _ in finish(tight, [tight.submit(p, params) for p in prompts])] == expected
    assert tight.get_stats()["preemptions"] > 0
    assert_nothing_held(tight)


def test_a_warm_prompt_reports_cached_tokens_and_gives_the_same_text() -> None:
    engine = build_engine()
    prompt = list(b"the same prompt, of several pages")
    cold = engine.submit(prompt, GREEDY)
    cold_text = finish(engine, [cold])
    warm = engine.submit(prompt, GREEDY)
    assert finish(engine, [warm]) == cold_text
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 32)


@pytest.mark.parametrize("prompt_len", [4, 8, 12])
def test_a_prompt_of_whole_pages_recomputes_its_last_page(prompt_len: int) -> None:
    engine = build_engine()
    prompt = list(range(97, 97 + prompt_len))
    first = finish(engine, [engine.submit(prompt, GREEDY)])
    warm = engine.submit(prompt, GREEDY)
    assert finish(engine, [warm]) == first
    assert warm.cached_tokens == prompt_len - 4


def test_the_answer_of_one_turn_is_cached_for_the_next() -> None:
    engine = build_engine()
    text = answer(engine, "question")
    handle = engine.submit(list(b"question" + text.encode() + b"more"), GREEDY)
    run_all(engine)
    assert handle.cached_tokens == (len("question") + len(text) - 1) // 4 * 4


def test_eight_equal_prompts_at_once_agree_and_later_ones_hit() -> None:
    engine = build_engine()
    prompt = list(b"eight at once: 24 bytes.")
    answers = finish(engine, [engine.submit(prompt, GREEDY) for _ in range(8)])
    assert len(set(answers)) == 1
    assert_nothing_held(engine)
    late = engine.submit(prompt, GREEDY)
    assert finish(engine, [late]) == answers[:1]
    assert late.cached_tokens == 20


def test_different_salts_share_nothing() -> None:
    engine = build_engine()
    prompt = list(b"a secret prompt of a tenant")
    texts = finish(engine, [engine.submit(prompt, GREEDY, salt="a")])
    other = engine.submit(prompt, GREEDY, salt="b")
    assert finish(engine, [other]) == texts
    assert other.cached_tokens == 0


def test_a_small_pool_finishes_every_task_with_its_solo_text_and_bounded_recompute() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=26)
    prompts = [[97 + i] * 10 for i in range(4)]
    solo = [answer(build_engine(), bytes(prompt), max_tokens=26) for prompt in prompts]
    engine = build_engine(n_tokens=40)
    answers = finish(engine, [engine.submit(prompt, params) for prompt in prompts])
    assert answers == [(text, "length") for text in solo]
    stats = engine.get_stats()
    assert stats["preemptions"] > 0
    assert stats["recomputed_tokens"] <= sum(map(len, prompts)) + 4 * 26
    assert_nothing_held(engine)


def test_max_tokens_zero_only_prefills() -> None:
    engine = build_engine()
    handle = engine.submit(list(b"warm this prompt up"), SamplingParams(max_tokens=0))
    assert finish(engine, [handle]) == [("", "length")]
    later = engine.submit(list(b"warm this prompt up"), GREEDY)
    run_all(engine)
    assert later.cached_tokens == 16
    assert_nothing_held(engine)


def test_max_tokens_one_samples_one_token() -> None:
    engine = build_engine()
    handle = engine.submit([97], SamplingParams(temperature=0.0, max_tokens=1))
    run_all(engine)
    (event,) = drain_events(handle)
    assert (event.finish_reason, event.completion_tokens, len(event.text)) == ("length", 1, 1)


def test_finish_reasons_are_true() -> None:
    engine = build_engine(ScriptedModel(echo_script("one two three", 1)))
    handles = [
        engine.submit([97], SamplingParams(temperature=0.0)),
        engine.submit([98], SamplingParams(temperature=0.0, max_tokens=5)),
        engine.submit([99], SamplingParams(temperature=0.0, stop=("two",))),
        engine.submit([100], SamplingParams(temperature=0.0, stop_token_ids=(ord("w"),))),
    ]
    run_all(engine)
    ends = [(drain_events(handle)) for handle in handles]
    assert ["".join(event.text for event in events) for events in ends] == [
        "one two three",
        "one t",
        "one ",
        "one t",
    ]
    assert [events[-1].finish_reason for events in ends] == ["stop", "length", "stop", "stop"]
    assert [events[-1].stop_string for events in ends] == [None, None, "two", None]
    assert [events[-1].completion_tokens for events in ends] == [14, 5, 7, 6]


def test_a_stop_string_settled_by_the_end_of_the_answer_is_a_stop() -> None:
    # "b" waits for "abcd" until the end decides that it does not come.
    engine = build_engine(ScriptedModel(echo_script("xxabc", 1)))
    params = SamplingParams(temperature=0.0, stop=("abcd", "b"), max_tokens=5)
    handle = engine.submit([97], params)
    run_all(engine)
    events = drain_events(handle)
    assert "".join(event.text for event in events) == "xxa"
    assert (events[-1].finish_reason, events[-1].stop_string) == ("stop", "b")


def test_min_tokens_holds_the_end_of_turn_back() -> None:
    engine = build_engine(ScriptedModel(lambda context: EOS))
    handle = engine.submit([97], SamplingParams(temperature=0.0, min_tokens=3, max_tokens=8))
    run_all(engine)
    events = drain_events(handle)
    assert [event.token_id == EOS for event in events] == [False, False, False, True]


def test_ignore_eos_goes_on_to_the_limit() -> None:
    engine = build_engine(ScriptedModel(lambda context: EOS))
    handle = engine.submit([97], SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4))
    assert finish(engine, [handle]) == [("", "length")]


def test_a_character_over_several_tokens_comes_out_whole() -> None:
    engine = build_engine(ScriptedModel(echo_script("a🎉b", 1)))
    handle = engine.submit([97], SamplingParams(temperature=0.0))
    run_all(engine)
    assert [event.text for event in drain_events(handle)] == ["a", "", "", "", "🎉", "b", ""]


def test_a_character_cut_by_max_tokens_becomes_the_replacement_character() -> None:
    engine = build_engine(ScriptedModel(echo_script("a🎉b", 1)))
    handle = engine.submit([97], SamplingParams(temperature=0.0, max_tokens=3))
    assert finish(engine, [handle]) == [("a\ufffd", "length")]


@pytest.mark.parametrize("cancel_at", range(14))
def test_cancel_at_any_step_gives_every_page_back_within_two_steps(cancel_at: int) -> None:
    engine = build_engine(max_step_tokens=16)
    bystander = engine.submit([120] * 3, SamplingParams(temperature=0.0, max_tokens=60))
    handle = engine.submit([97] * 90, GREEDY)
    for _ in range(cancel_at):
        engine.step()
    handle.cancel()
    handle.cancel()
    engine.step()
    engine.step()
    assert drain_events(handle)[-1].finish_reason == "cancelled"
    assert engine.get_stats()["active_tasks"] == 1
    engine.pool.check()
    text, reason = finish(engine, [bystander])[0]
    assert (len(text), reason) == (60, "length")
    assert_nothing_held(engine)


def test_cancelling_a_finished_task_changes_nothing() -> None:
    engine = build_engine()
    handle = engine.submit([97], GREEDY)
    answers = finish(engine, [handle])
    handle.cancel()
    engine.step()
    assert not drain_events(handle)
    assert answers[0][1] == "length"


def test_a_task_that_is_cancelled_while_a_step_looks_at_its_inboxes_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build_engine()
    late: list[TaskHandle] = []

    def come_and_go() -> None:
        late.append(engine.submit([98], GREEDY))
        late[0].cancel()

    thread = threading.Thread(target=come_and_go)

    class Inbox(deque[Task]):
        def __len__(self) -> int:
            if thread.ident is None:
                thread.start()
                # Held up until the step has what it came for, or else done by then.
                thread.join(0.05)
            return super().__len__()

    monkeypatch.setattr(engine._scheduler, "_cancelled", Inbox())
    first = engine.submit([97], GREEDY)
    engine.step()
    thread.join(10)
    run_all(engine)
    assert [drain_events(handle)[-1].finish_reason for handle in (first, *late)] == ["length", "cancelled"]
    assert engine.drain(0)
    assert_nothing_held(engine)


def test_what_can_never_fit_is_refused_and_the_next_is_served() -> None:
    engine = build_engine(n_tokens=64, max_seq_len=128)
    with pytest.raises(PoolTooSmallError, match="65 tokens of KV cache, the pool holds 64"):
        engine.submit([97] * 64, GREEDY)
    with pytest.raises(PoolTooSmallError):
        engine.submit([97] * 50, GREEDY)
    with pytest.raises(ContextLengthError, match="maximum context length is 128 tokens"):
        engine.submit([97] * 128, GREEDY)
    assert len(answer(engine, "short")) == 24


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        ([], ValueError, "empty prompt"),
        ([97, 260], ValueError, "ids in 0..259, got 260"),
        ([-1], ValueError, "got -1"),
        ([97, True], TypeError, "got True"),
        ([1.5], TypeError, "got 1.5"),
    ],
)
def test_a_bad_prompt_is_refused_by_name(prompt: list[int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        build_engine().submit(prompt, GREEDY)


def test_params_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        build_engine().submit([97], SamplingParams(logit_bias={260: 1.0}))
    with pytest.raises(ValueError, match="stop_token_ids"):
        build_engine().submit([97], SamplingParams(stop_token_ids=(999,)))


def test_a_full_queue_is_refused_with_a_time_to_retry() -> None:
    engine = build_engine(max_queue=3)
    for _ in range(3):
        engine.submit([97], GREEDY)
    with pytest.raises(QueueFullError) as caught:
        engine.submit([97], GREEDY)
    assert caught.value.retry_after_s >= 1
    run_all(engine)
    engine.submit([97], GREEDY)


def test_drain_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    engine = build_engine(start=True)
    handles = [engine.submit([97 + i], GREEDY) for i in range(12)]
    assert engine.drain(30)
    assert [list(handle.iter_events())[-1].finish_reason for handle in handles] == ["length"] * 12
    with pytest.raises(EngineUnavailableError):
        engine.submit([97], GREEDY)
    engine.shutdown()


def test_shutdown_ends_open_tasks_as_cancelled_and_frees_everything() -> None:
    engine = build_engine(start=True, max_seq_len=4096, n_tokens=4096)
    handle = engine.submit([97], SamplingParams(temperature=0.0))
    next(handle.iter_events())
    engine.shutdown()
    engine.shutdown()
    assert list(handle.iter_events())[-1].finish_reason == "cancelled"
    assert_nothing_held(engine)
