"""Who waits for the end of all tasks must not wait for ever, whatever went wrong meanwhile."""

from __future__ import annotations

import pytest

from astrai_triton.engine import SamplingParams
from drive import assert_nothing_held, build_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def test_drain_ends_after_a_step_that_failed_when_it_had_ended_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine()
    cancelled, running = engine.submit([97], GREEDY), engine.submit([98], GREEDY)
    engine.step()
    cancelled.cancel()

    def explode() -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        # By then the cancelled task has been cleaned up.
        patch.setattr(engine._scheduler._stepper, "_refill", explode)
        engine._scheduler._try_step()
    assert [handle.take()[-1].finish_reason for handle in (cancelled, running)] == ["cancelled", "error"]
    assert engine.drain(0)
    assert_nothing_held(engine)


def test_drain_waits_for_tasks_that_arrived_while_a_step_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine()
    engine.submit([97], GREEDY)
    late = []

    def explode() -> None:
        late.append(engine.submit([98], GREEDY))
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler._stepper, "_refill", explode)
        engine._scheduler._try_step()
    # It came too late for that step; whether it fails with it or goes on, it has an end.
    while engine.get_stats()["active_tasks"] or engine.get_stats()["waiting_queue"]:
        assert not engine.drain(0)
        engine.step()
    assert late[0].take()[-1].finish_reason in ("error", "length")
    assert engine.drain(0)
