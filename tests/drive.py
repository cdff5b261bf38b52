"""An engine stepped by hand, over the scripted model unless told otherwise; a stand-in for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from astrai_triton.engine import InferenceEngine, SamplingParams, TaskHandle, TokenEvent
from astrai_triton.engine.graphs import Captured
from astrai_triton.engine.model import Model
from fakes import ByteTokenizer, ScriptedModel


def build_engine(model: Model | None = None, **sizes: Any) -> InferenceEngine:
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
    return handle.take()


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


class Replayer:
    """Records forwards as a CUDA graph would: the output stays where it is, replays fill it anew."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, forward: Callable[[], torch.Tensor]) -> Captured:
        logits = forward()
        size = len(logits)
        self.sizes.append(size)

        def replay() -> None:
            self.replayed.append(size)
            logits.copy_(forward())

        return Captured(logits, replay)
