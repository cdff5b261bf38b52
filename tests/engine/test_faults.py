from __future__ import annotations

import pytest

from astrai_triton.engine import SamplingParams
from astrai_triton.errors import EngineUnavailableError, NonFiniteLogitsError
from drive import answer, assert_nothing_held, build_engine, drain_events, finish, run_all
from fakes import Context, ScriptedModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def test_a_fault_in_forward_ends_only_the_task_that_causes_it() -> None:
    def explode(contexts: list[Context]) -> None:
        if any(context[0] == 66 for context in contexts):
            raise RuntimeError("injected")

    engine = build_engine(ScriptedModel(on_forward=explode))
    solo = [answer(build_engine(), prompt) for prompt in ("aaa", "cc")]
    handles = [engine.submit(list(prompt), GREEDY) for prompt in (b"aaa", b"B", b"cc")]
    answers = finish(engine, handles)
    assert [text for text, _ in answers] == [solo[0], "", solo[1]]
    assert [reason for _, reason in answers] == ["length", "error", "length"]
    assert_nothing_held(engine)


def test_a_fault_in_decode_leaves_the_text_of_the_others() -> None:
    def explode(contexts: list[Context]) -> None:
        if any(context[0] == 66 and len(context) > 6 for context in contexts):
            raise RuntimeError("injected")

    engine = build_engine(ScriptedModel(on_forward=explode))
    handles = [engine.submit(list(prompt), GREEDY) for prompt in (b"aaa", b"B")]
    answers = finish(engine, handles)
    assert answers[0] == (answer(build_engine(), "aaa"), "length")
    assert (len(answers[1][0]), answers[1][1]) == (6, "error")
    assert_nothing_held(engine)


def test_a_fault_in_a_callback_ends_only_its_task() -> None:
    engine = build_engine()
    seen: list[str | None] = []

    def callback(event: object) -> None:
        seen.append(event.finish_reason)  # type: ignore[attr-defined]
        if len(seen) == 3:
            raise RuntimeError("injected")

    bad = engine.submit([97], GREEDY, callback=callback)
    good = engine.submit([98], GREEDY)
    run_all(engine)
    events = drain_events(bad)
    assert events[-1].finish_reason == "error"
    assert isinstance(events[-1].error, RuntimeError)
    assert seen == [None, None, None, "error"]
    assert drain_events(good)[-1].finish_reason == "length"
    assert_nothing_held(engine)


def test_a_fault_in_the_tokenizer_ends_only_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine()

    class BrokenDetokenizer:
        def push(self, token_id: int) -> str:
            raise RuntimeError("injected")

        def flush(self) -> str:
            return ""

    with monkeypatch.context() as patch:
        patch.setattr(engine.tokenizer, "detokenizer", BrokenDetokenizer)
        bad = engine.submit([97], GREEDY)
    good = engine.submit([98], GREEDY)
    assert [reason for _, reason in finish(engine, [bad, good])] == ["error", "length"]
    assert_nothing_held(engine)


def test_a_fault_of_the_decoder_on_the_quick_way_ends_the_task_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine()

    class BreaksOnce:
        num_pushed = 0

        def push(self, token_id: int) -> str:
            self.num_pushed += 1
            if self.num_pushed == 4:
                raise RuntimeError("injected")
            return chr(token_id)

        def flush(self) -> str:
            return ""

    with monkeypatch.context() as patch:
        patch.setattr(engine.tokenizer, "detokenizer", BreaksOnce)
        handle = engine.submit([97], GREEDY)
    engine.step()
    num_read = len(handle.take())
    run_all(engine)
    assert len(handle.take_texts()) == 3 - num_read
    assert handle.take_texts() == []
    assert handle.has_events
    assert [event.finish_reason for event in handle.take()] == ["error"]
    assert not handle.take()
    assert_nothing_held(engine)


def test_a_fault_in_alloc_after_admission_ends_only_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine()
    bad, good = engine.submit([97], GREEDY), engine.submit([98] * 9, GREEDY)
    extend, calls = engine.pool.extend, []

    def fail_once(lease: object, num_tokens: int) -> None:
        calls.append(num_tokens)
        if len(calls) == 1:
            raise RuntimeError("injected")
        extend(lease, num_tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.pool, "extend", fail_once)
    assert [reason for _, reason in finish(engine, [bad, good])] == ["error", "length"]
    assert_nothing_held(engine)


def test_non_finite_logits_end_only_their_task() -> None:
    class PoisonedModel(ScriptedModel):
        def __call__(self, *args: object) -> object:  # type: ignore[override]
            logits = super().__call__(*args)  # type: ignore[arg-type]
            logits[0, 5] = float("nan")
            return logits

    engine = build_engine(PoisonedModel())
    bad, good = engine.submit([97], GREEDY), engine.submit([98], GREEDY)
    engine.step()
    (event,) = drain_events(bad)
    assert isinstance(event.error, NonFiniteLogitsError)
    assert drain_events(good)[0].finish_reason is None


def test_a_fault_of_the_step_itself_ends_its_tasks_and_the_loop_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build_engine(start=True)

    def explode() -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler._stepper, "_refill", explode)
        (event,) = engine.submit([97], GREEDY).iter_events()
        assert event.finish_reason == "error"
    assert engine.is_alive
    assert len(engine.generate("abc", temperature=0, max_tokens=5)) == 5
    engine.shutdown()
    assert_nothing_held(engine)


def test_a_scheduler_that_cannot_go_on_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(start=True)

    def explode() -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(engine._scheduler._stepper, "_refill", explode)
    for _ in range(3):
        (event,) = engine.submit([97], GREEDY).iter_events()
        assert event.finish_reason == "error"
    with pytest.raises(EngineUnavailableError, match="injected"):
        engine.submit([97], GREEDY)
    assert not engine.is_alive


def test_a_fault_while_a_task_starts_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine()
    bad, good = engine.submit([97], GREEDY), engine.submit([98], GREEDY)
    pages_needed, calls = engine.pool.pages_needed, []

    def fail_once(lease: object, num_tokens: int) -> int:
        calls.append(num_tokens)
        if len(calls) == 1:
            raise RuntimeError("injected")
        return pages_needed(lease, num_tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.pool, "pages_needed", fail_once)
    assert [reason for _, reason in finish(engine, [bad, good])] == ["error", "length"]
    assert engine.get_stats()["active_tasks"] == 0
    assert all(lease is None for lease in engine.pool._row_to_lease)
    assert_nothing_held(engine)


def test_a_fault_that_does_not_come_back_is_logged_and_costs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    faults = [RuntimeError("injected")]

    def explode(contexts: list[Context]) -> None:
        if faults and len(contexts) > 1:
            raise faults.pop()

    engine = build_engine(ScriptedModel(on_forward=explode))
    answers = finish(engine, [engine.submit([97], GREEDY), engine.submit([98], GREEDY)])
    assert [text for text, _ in answers] == [answer(build_engine(), "a"), answer(build_engine(), "b")]
    assert "a forward of 2 tasks failed" in caplog.text
    assert "injected" in caplog.text
