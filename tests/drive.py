"""An engine over the scripted model, stepped by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from astrai_triton.engine import InferenceEngine, SamplingParams, TaskHandle, TokenEvent
from fakes import ByteTokenizer, ScriptedModel


def build_engine(model: ScriptedModel | None = None, **sizes: Any) -> InferenceEngine:
    """Paged, page 4, unless ``sizes`` say otherwise; not started."""
    sizes = {
        "max_batch_size": 8,
        "max_seq_len": 512,
        "page_size": 4,
        "n_tokens": 2048,
        "start": False,
    } | sizes
    return InferenceEngine(model or ScriptedModel(), ByteTokenizer(), **sizes)


def drain_events(handle: TaskHandle) -> list[TokenEvent]:
    """Events posted so far, without waiting."""
    events = list(handle._events)
    handle._events.clear()
    return events


def run_all(engine: InferenceEngine, max_steps: int = 10_000) -> int:
    """Step until nothing is left; returns the number of steps and checks the pool after each."""
    for steps in range(max_steps):
        stats = engine.get_stats()
        if not stats["active_tasks"] and not stats["waiting_queue"]:
            return steps
        engine.step()
        engine.pool.check()
    raise AssertionError(f"not idle after {max_steps} steps: {engine.get_stats()}")


def finish(engine: InferenceEngine, handles: Sequence[TaskHandle]) -> list[tuple[str, str]]:
    """Run everything; ``(text, finish reason)`` of each handle."""
    run_all(engine)
    answers = []
    for handle in handles:
        events = drain_events(handle)
        assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
        answers.append(("".join(event.text for event in events), str(events[-1].finish_reason)))
    return answers


def answer(engine: InferenceEngine, prompt: str | bytes, **fields: Any) -> str:
    """One prompt alone, greedy unless ``fields`` say otherwise."""
    data = prompt.encode() if isinstance(prompt, str) else prompt
    handle = engine.submit(list(data), SamplingParams(**({"temperature": 0.0, "max_tokens": 24} | fields)))
    return finish(engine, [handle])[0][0]


def assert_nothing_held(engine: InferenceEngine) -> None:
    """All pages are free or only cached, and no row is taken."""
    engine.pool.check()
    stats = engine.get_stats()
    assert stats["pages_used"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
