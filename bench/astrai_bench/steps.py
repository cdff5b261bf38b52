"""CPU time of the scheduler's step, and what policies do to those who wait."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from astrai_bench.scripted import VOCAB, ByteTokenizer, TableModel
from astrai_triton.engine import InferenceEngine, SamplingParams, TaskHandle
from astrai_triton.engine.budget import PolicyName
from astrai_triton.engine.sample_plan import SamplePlan

_WARM_STEPS = 30
_PROMPT_LEN = 24


@attrs.frozen(kw_only=True)
class StepTimes:
    """CPU microseconds of one decode step of ``num_tasks`` tasks, the model's forward left out."""

    num_tasks: int
    sampling: str
    mean_us: float
    p50_us: float
    p99_us: float
    model_us: float
    """What the forward took; not in the others."""
    sampling_us: float
    """Of the mean, what drawing the tokens takes: torch operations, timed alone on the same shapes."""

    @property
    def scheduling_us(self) -> float:
        """The rest of the mean: admission, slots, plan, hand-over."""
        return self.mean_us - self.sampling_us


def time_steps(num_tasks: int, num_steps: int, *, temperature: float = 0.0) -> StepTimes:
    """Step an engine of ``num_tasks`` tasks by hand, in steady decoding.

    Args:
        num_tasks: tasks that run.
        num_steps: steps to time.
        temperature: 0 is greedy, else top-k 50.
    """
    model = TableModel()
    with InferenceEngine(
        model,
        ByteTokenizer(),
        max_batch_size=num_tasks,
        max_seq_len=_PROMPT_LEN + _WARM_STEPS + num_steps + 16,
        n_tokens=num_tasks * (_PROMPT_LEN + _WARM_STEPS + num_steps + 32) // 16 * 16,
        max_step_tokens=max(512, num_tasks),
        max_queue=num_tasks,
        start=False,
    ) as engine:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=_WARM_STEPS + num_steps + 8)
        handles = [engine.submit(_make_prompt(i), params) for i in range(num_tasks)]
        while engine.get_stats()["total_tokens"] < _WARM_STEPS * num_tasks:
            engine.step()
        samples, forwards = [], []
        for _ in range(num_steps):
            before, started = model.cpu_s, time.thread_time()
            engine.step()
            total = time.thread_time() - started
            forwards.append(model.cpu_s - before)
            samples.append(total - forwards[-1])
            for handle in handles:
                handle.take()
    samples.sort()
    return StepTimes(
        num_tasks=num_tasks,
        sampling="greedy" if temperature == 0 else "top-k 50",
        mean_us=statistics.fmean(samples) * 1e6,
        p50_us=samples[len(samples) // 2] * 1e6,
        p99_us=samples[int(len(samples) * 0.99)] * 1e6,
        model_us=statistics.fmean(forwards) * 1e6,
        sampling_us=_time_sampling(num_tasks, params, num_steps) * 1e6,
    )


def _time_sampling(num_tasks: int, params: SamplingParams, num_steps: int) -> float:
    """CPU seconds of drawing one token of each task, mean."""
    plan = SamplePlan([params] * num_tasks, [1] * num_tasks, VOCAB, torch.device("cpu"))
    logits = torch.rand(num_tasks, VOCAB, generator=torch.Generator().manual_seed(2))
    positions = np.arange(num_tasks)
    with torch.inference_mode():
        for _ in range(_WARM_STEPS):
            plan.draw(logits, positions).tolist()
        started = time.thread_time()
        for _ in range(num_steps):
            plan.draw(logits, positions).tolist()
    return (time.thread_time() - started) / num_steps


def _make_prompt(i: int) -> list[int]:
    return [33 + (i * 7 + j) % 90 for j in range(_PROMPT_LEN)]


@attrs.frozen(kw_only=True)
class MixedLoad:
    """What clients wait for under one policy, in milliseconds of a simulated clock."""

    policy: PolicyName
    ttft_short_p50_ms: float
    ttft_short_p95_ms: float
    ttft_long_p50_ms: float
    worst_gap_ms: float
    """Longest time between two tokens of one answer."""
    tokens_per_s: float


_MEAN_GAP_MS = 75.0
FORWARD_MS, TOKEN_MS = 4.0, 0.1
"""The simulated forward: a fixed part, and one for each of its tokens."""


def simulate_load(policy: PolicyName, num_requests: int = 120, max_step_tokens: int = 512) -> MixedLoad:
    """Short prompts among long ones, arriving at random; the clock advances by what the forwards would take.

    Args:
        policy: how prompts share a step.
        num_requests: one in six has a prompt of 2000 tokens, the others one of 40; answers have 40.
        max_step_tokens: of the engine.
    """
    rng = random.Random(11)
    model = TableModel()
    clock = 0.0
    arrivals = _draw_arrivals(rng, num_requests)
    open_tasks: dict[TaskHandle, _Wait] = {}
    ended: list[_Wait] = []
    with InferenceEngine(
        model,
        ByteTokenizer(),
        max_batch_size=32,
        max_seq_len=4096,
        n_tokens=65536,
        max_step_tokens=max_step_tokens,
        policy=policy,
        start=False,
    ) as engine:
        while arrivals or open_tasks:
            if not open_tasks:
                clock = max(clock, arrivals[0][0])
            while arrivals and arrivals[0][0] <= clock:
                at, prompt = arrivals.pop(0)
                handle = engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=40))
                open_tasks[handle] = _Wait(at, len(prompt))
            before = model.num_tokens
            engine.step()
            clock += FORWARD_MS + TOKEN_MS * (model.num_tokens - before)
            for handle, wait in list(open_tasks.items()):
                for event in handle.take():
                    wait.times.append(clock)
                    if event.finish_reason is not None:
                        ended.append(open_tasks.pop(handle))
    return _summarize(policy, ended, clock)


@attrs.define
class _Wait:
    arrived: float
    prompt_len: int
    times: list[float] = attrs.field(factory=list)


def _draw_arrivals(rng: random.Random, num_requests: int) -> list[tuple[float, list[int]]]:
    at, arrivals = 0.0, []
    for i in range(num_requests):
        at += rng.expovariate(1 / _MEAN_GAP_MS)
        length = 2000 if i % 6 == 0 else 40
        arrivals.append((at, [rng.randrange(33, 123) for _ in range(length)]))
    return arrivals


def _summarize(policy: PolicyName, waits: Sequence[_Wait], clock: float) -> MixedLoad:
    short = sorted(wait.times[0] - wait.arrived for wait in waits if wait.prompt_len < 100)
    long = sorted(wait.times[0] - wait.arrived for wait in waits if wait.prompt_len >= 100)
    gaps = [
        after - before for wait in waits for before, after in zip(wait.times, wait.times[1:], strict=False)
    ]
    return MixedLoad(
        policy=policy,
        ttft_short_p50_ms=short[len(short) // 2],
        ttft_short_p95_ms=short[int(len(short) * 0.95)],
        ttft_long_p50_ms=long[len(long) // 2],
        worst_gap_ms=max(gaps),
        tokens_per_s=sum(len(wait.times) for wait in waits) / clock * 1e3,
    )
