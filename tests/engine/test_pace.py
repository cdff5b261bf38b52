"""What bounds the time from one token of a task to its next: the rows of a step."""

from __future__ import annotations

import pytest

from astrai_triton.engine import SamplingParams
from drive import assert_nothing_held, build_engine, drain_events, run_all
from fakes import ScriptedModel

MAX_STEP_TOKENS = 128


@pytest.mark.parametrize("policy", ["budget", "fcfs"])
def test_beside_a_stream_of_long_prompts_every_step_gives_a_token_within_the_budget(policy: str) -> None:
    model = ScriptedModel()
    engine = build_engine(
        model, max_seq_len=1100, n_tokens=8192, max_step_tokens=MAX_STEP_TOKENS, policy=policy
    )
    decoding = engine.submit([97], SamplingParams(temperature=0.0, max_tokens=100))
    engine.step()
    drain_events(decoding)
    for i in range(60):
        if i % 4 == 0:
            # No two share a prefix, so that all of it is computed.
            engine.submit([98 + i // 4] * 1000, SamplingParams(temperature=0.0, max_tokens=4))
        num_before = len(model.forwards)
        engine.step()
        assert len(drain_events(decoding)) == 1
        rows = [sum(q_lens) for q_lens in model.forwards[num_before:]]
        assert len(rows) <= 2
        assert MAX_STEP_TOKENS // 2 < sum(rows) <= MAX_STEP_TOKENS + 8
    run_all(engine)
    assert_nothing_held(engine)


def test_a_step_of_prefill_computes_no_more_than_its_budget_however_many_wait() -> None:
    model = ScriptedModel()
    engine = build_engine(model, max_step_tokens=32, n_tokens=1024)
    for i in range(20):
        engine.submit([97 + i] * 50, SamplingParams(temperature=0.0, max_tokens=2))
    run_all(engine)
    assert max(sum(q_lens) for q_lens in model.forwards) <= 32
