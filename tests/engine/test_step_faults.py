"""A step that fails ends what was in it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from astrai_triton.engine import InferenceEngine, SamplingParams, TaskHandle
from drive import answer, assert_nothing_held, build_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def fail_step(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None], times: int = 1
) -> None:
    """Let the next steps do ``meanwhile``, then fail."""
    stepper = engine._scheduler._stepper
    refill = stepper._refill
    left = [times]

    def explode() -> None:
        if left[0]:
            left[0] -= 1
            meanwhile()
            raise RuntimeError("injected")
        refill()

    monkeypatch.setattr(stepper, "_refill", explode)


def run_with_late_arrival(
    monkeypatch: pytest.MonkeyPatch, *, times: int, is_cancelled: bool = False
) -> tuple[str | None, str, str | None]:
    """How a task in a failing step ends; text and end of one that arrives during that step."""
    engine = build_engine(start=True)
    late: list[TaskHandle] = []

    def arrive() -> None:
        if not late:
            late.append(engine.submit(list(b"late"), GREEDY))
            if is_cancelled:
                late[0].cancel()

    fail_step(engine, monkeypatch, arrive, times)
    (event,) = engine.submit(list(b"early"), GREEDY).iter_events()
    events = list(late[0].iter_events())
    engine.shutdown()
    assert_nothing_held(engine)
    return event.finish_reason, "".join(event.text for event in events), events[-1].finish_reason


def test_a_task_that_arrives_while_a_step_fails_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    reason, text, late_reason = run_with_late_arrival(monkeypatch, times=1)
    assert reason == "error"
    assert (text, late_reason) == (answer(build_engine(), "late"), "length")


def test_a_task_that_arrives_while_a_step_fails_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    reason, text, late_reason = run_with_late_arrival(monkeypatch, times=1, is_cancelled=True)
    assert reason == "error"
    assert (text, late_reason) == ("", "cancelled")


def test_a_task_that_arrives_while_the_loop_dies_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reason, text, late_reason = run_with_late_arrival(monkeypatch, times=1 << 30)
    assert (reason, text, late_reason) == ("error", "", "error")
