"""The arrays that a steady decode batch runs on give what task by task would give."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from astrai_triton.engine import SamplingParams, SamplingPipeline
from astrai_triton.engine.sample_plan import SamplePlan, can_plan
from astrai_triton.engine.sampling import SampleRow
from astrai_triton.grammar import Grammar
from drive import assert_nothing_held, build_engine, finish
from fakes import ScriptedModel
from sampling_paths import Path, all_paths

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 0, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 0, "logit_bias": {3: 4.0, 7: -100.0}},
]


@all_paths
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[1:2], KINDS], ids=["greedy", "top-k", "mixed"])
def test_a_plan_draws_the_bits_of_the_pipeline(kinds: list[dict[str, float]], path: Path) -> None:
    with path():
        check_plan(kinds)


def check_plan(kinds: list[dict[str, float]]) -> None:
    rng = random.Random(5)
    params = [SamplingParams(**rng.choice(kinds)) for _ in range(12)]  # type: ignore[arg-type]
    seeds = [rng.randrange(2**64) for _ in params]
    plan = SamplePlan(params, seeds, 200, torch.device("cpu"))
    positions = np.array([rng.randrange(1000) for _ in params])
    for step in range(5):
        logits = torch.randn(12, 200, generator=torch.Generator().manual_seed(step))
        before = logits.clone()
        rows = [
            SampleRow(p, seed, int(at)) for p, seed, at in zip(params, seeds, positions + step, strict=True)
        ]
        expected = [token.token_id for token in SamplingPipeline()(logits, rows)]
        assert plan.draw(logits, positions + step).tolist() == expected
        torch.testing.assert_close(logits, before, rtol=0, atol=0)


def test_rows_that_change_from_token_to_token_are_not_planned() -> None:
    assert can_plan(SamplingParams(temperature=0.5, min_tokens=4), num_generated=4)
    assert not can_plan(SamplingParams(min_tokens=4), num_generated=3)
    assert not can_plan(SamplingParams(presence_penalty=0.1), num_generated=9)
    assert not can_plan(SamplingParams(logprobs=True), num_generated=9)
    assert not can_plan(SamplingParams(grammar=Grammar.regex("a+")), num_generated=9)


@pytest.mark.parametrize("n_tokens", [2048, 72], ids=["roomy", "tight"])
def test_quiet_tasks_and_those_that_watch_their_text_decode_side_by_side(n_tokens: int) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(97, 123) for _ in range(rng.randrange(1, 12))] for _ in range(12)]
    variants: list[dict[str, object]] = [
        {},
        {"stop": ("never",)},
        {"presence_penalty": 1e-9},
        {"min_tokens": 3},
    ]
    variants.append({"logprobs": True, "top_logprobs": 4})
    texts = []
    for shift in range(len(variants)):
        engine = build_engine(ScriptedModel(spread=7.0), n_tokens=n_tokens)
        handles = [
            engine.submit(
                prompt,
                SamplingParams(temperature=1.0, seed=i, max_tokens=5 + i, **variants[(i + shift) % 5]),  # type: ignore[arg-type]
            )
            for i, prompt in enumerate(prompts)
        ]
        texts.append(finish(engine, handles))
        assert_nothing_held(engine)
    assert all(text == texts[0] for text in texts)


def test_events_of_a_quiet_task_carry_text_and_counts() -> None:
    engine = build_engine()
    handle = engine.submit([97], SamplingParams(temperature=0.0, max_tokens=6))
    while engine.get_stats()["waiting_queue"] or engine.get_stats()["active_tasks"]:
        engine.step()
    events = handle.take()
    assert [event.completion_tokens for event in events] == [1, 2, 3, 4, 5, 6]
    assert all(event.text == chr(event.token_id or 0) for event in events)
    assert [event.finish_reason for event in events] == [None] * 5 + ["length"]
    assert handle.take() == []
