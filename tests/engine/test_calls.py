"""Work that others have done in the scheduler's thread, and what the engine tells about itself."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from astrai_triton.engine import InferenceEngine, SamplingParams
from astrai_triton.engine.stats import MAX_KEYS, StepStats
from astrai_triton.engine.trace import StepTrace
from astrai_triton.errors import EngineUnavailableError
from drive import build_engine, run_all
from fakes import Context, ScriptedModel


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


# explain_prefix: a call from any thread


def test_a_call_runs_in_the_thread_of_the_steps() -> None:
    threads: list[str] = []
    with build_engine(start=True) as engine:
        engine._scheduler.call(lambda: threads.append(threading.current_thread().name)).result(10)
    assert threads == ["astrai-scheduler"]


def test_what_a_call_raises_is_its_own() -> None:
    with build_engine(start=True) as engine:
        with pytest.raises(ZeroDivisionError):
            engine._scheduler.call(lambda: 1 // 0).result(10)
        assert engine.generate("abc", temperature=0, max_tokens=3)
        assert engine.is_alive


def test_a_call_that_was_cancelled_is_not_made() -> None:
    made: list[None] = []
    engine = build_engine()
    future = engine._scheduler.call(lambda: made.append(None))
    assert future.cancel()
    engine.step()
    assert not made


def test_a_stopped_engine_refuses_calls_and_answers_those_that_wait() -> None:
    engine = build_engine()
    waiting = engine.explain_prefix([97])
    engine.shutdown()
    with pytest.raises(EngineUnavailableError):
        waiting.result(1)
    with pytest.raises(EngineUnavailableError):
        engine.explain_prefix([97])


def test_no_call_is_lost_when_the_engine_stops_meanwhile() -> None:
    for _ in range(20):
        engine = build_engine(start=True)
        futures: list[Future[Any]] = []

        def ask(engine: InferenceEngine = engine, futures: list[Future[Any]] = futures) -> None:
            try:
                while True:
                    futures.append(engine.explain_prefix([97]))
            except EngineUnavailableError:
                return

        thread = threading.Thread(target=ask)
        thread.start()
        while not futures:
            time.sleep(0)
        engine.shutdown()
        thread.join(10)
        assert not thread.is_alive()
        for future in futures:
            future.exception(10)


def test_the_prefix_of_a_running_engine_is_explained() -> None:
    with build_engine(start=True) as engine:
        engine.generate("0123456789", temperature=0, max_tokens=1)
        report = engine.explain_prefix(list(b"012345xx")).result(10)
        assert (report.page_size, report.cached_tokens, report.agreeing_tokens) == (4, 4, 6)
        assert report.difference is not None
        assert (report.difference.asked, report.difference.cached) == (ord("x"), ord("6"))
        assert engine.explain_prefix(list(b"0123456789"), "other").result(10).cached_tokens == 0


@pytest.mark.parametrize(("prompt", "kind"), [([], ValueError), ([260], ValueError), ([True], TypeError)])
def test_a_prompt_that_cannot_run_is_not_explained(prompt: list[int], kind: type[Exception]) -> None:
    with pytest.raises(kind, match="prompt_ids"):
        build_engine().explain_prefix(prompt)


# get_stats


def test_ended_tasks_are_counted_by_reason() -> None:
    def fail_on_z(contexts: list[Context]) -> None:
        if any(ord("z") in context[:1] for context in contexts):
            raise RuntimeError("injected")

    engine = build_engine(ScriptedModel(on_forward=fail_on_z))
    for prompt in (b"a", b"b", b"z"):
        engine.submit(list(prompt), greedy(3))
    engine.submit([97], SamplingParams(temperature=0.0, stop_token_ids=tuple(range(97, 123))))
    engine.submit([99], greedy(3)).cancel()
    run_all(engine)
    assert engine.get_stats()["finished"] == {"stop": 1, "length": 2, "cancelled": 1, "error": 1}


def test_tokens_are_counted_by_key_while_they_are_sampled() -> None:
    engine = build_engine()
    engine.submit([97] * 6, greedy(20), key="a")
    engine.submit([98] * 3, greedy(4), key="b")
    engine.submit([99] * 3, greedy(4))
    engine.step()
    first = engine.get_stats()["tokens_by_key"]
    engine.step()
    second = engine.get_stats()["tokens_by_key"]
    assert first.keys() == {"a", "b"}
    assert second["a"] == first["a"] + 1
    run_all(engine)
    assert engine.get_stats()["tokens_by_key"] == {"a": 26, "b": 7}


def test_cached_prompt_tokens_are_not_counted_again() -> None:
    engine = build_engine()
    for _ in range(2):
        engine.submit([97] * 9, greedy(1), key="a")
        run_all(engine)
    assert engine.get_stats()["tokens_by_key"] == {"a": (9 + 1) + (1 + 1)}


def test_so_many_keys_are_counted_and_no_more() -> None:
    stats = StepStats()
    for i in range(MAX_KEYS + 2):
        stats.record_served(str(i), 1)
    stats.record_served(None, 1)
    assert len(stats.served) == MAX_KEYS
    assert "1" not in stats.served
    assert stats.served[str(MAX_KEYS + 1)] == 1


def test_the_wait_in_the_queue_is_averaged() -> None:
    engine = build_engine(max_batch_size=1)
    engine.submit([97], greedy(2))
    run_all(engine)
    first = engine.get_stats()["queue_wait_ms"]
    engine.submit([97], greedy(2))
    time.sleep(0.2)
    run_all(engine)
    # The second one weighs a tenth; figures are rounded to a tenth of a millisecond.
    assert engine.get_stats()["queue_wait_ms"] >= 0.9 * first + 20 - 0.1


def test_steps_are_counted_by_their_duration() -> None:
    stats = StepStats()
    for seconds in (1e-6, 1e-4, 1.5e-4, 0.03, 10.0, 11.0):
        stats.record_step(seconds)
    histogram = stats.histogram()
    assert (histogram.bounds[0], histogram.bounds[-1], len(histogram.bounds)) == (1e-4, 10.0, 16)
    assert list(histogram.bounds) == sorted(set(histogram.bounds))
    counted = dict(zip((*histogram.bounds, None), histogram.counts, strict=True))
    assert {bound: count for bound, count in counted.items() if count} == {
        1e-4: 2,
        2e-4: 1,
        0.05: 1,
        10.0: 1,
        None: 1,
    }
    assert histogram.total == pytest.approx(21.030251)


def test_a_running_engine_counts_its_steps() -> None:
    with build_engine(start=True) as engine:
        assert sum(engine.step_histogram().counts) == 0
        engine.generate("abc", temperature=0, max_tokens=9)
        # The step at hand is counted once it is over.
        engine.shutdown()
        histogram = engine.step_histogram()
    # The first step samples twice: after the prompt, and once more.
    assert sum(histogram.counts) == engine.get_stats()["steps"] >= 8
    assert histogram.total > 0


def test_evictions_and_preemptions_are_counted() -> None:
    engine = build_engine(n_tokens=40, max_batch_size=4)
    for i in range(4):
        engine.submit([97 + i] * 5, greedy(12))
    run_all(engine)
    for i in range(4):
        engine.submit([107 + i] * 5, greedy(12))
        run_all(engine)
    stats = engine.get_stats()
    assert stats["preemptions"] > 0
    assert stats["evicted_pages"] > 0


def test_an_observer_is_closed_with_the_engine() -> None:
    class Spy(StepTrace):
        num_closed = 0

        def close(self) -> None:
            self.num_closed += 1

    spy = Spy(None)
    with build_engine(observer=spy):
        assert spy.num_closed == 0
    assert spy.num_closed == 1
