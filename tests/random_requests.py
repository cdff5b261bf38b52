"""Requests of every kind, drawn at random, and what comes back of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from astrai_triton.engine import InferenceEngine, SamplingParams, TokenEvent
from drive import assert_nothing_held, build_engine
from fakes import EOS, ScriptedModel

LONGEST_PROMPT = 40
LONGEST_ANSWER = 12
SPREAD = 7.0
"""Of the scripted model: as wide as a choice is to be left to the sampler."""

_LETTERS = range(97, 123)
_E_ACUTE = {195: 31.0, 169: 31.0}
"""Makes the two bytes of an e with acute accent as likely as letters, in any order."""


@attrs.frozen(eq=False)
class Request:
    """What one client asks for; its seed is always set."""

    prompt: tuple[int, ...]
    params: SamplingParams


@attrs.frozen
class Answer:
    """Everything a client can see of an answer, log-probabilities to the last bit."""

    token_ids: tuple[int | None, ...]
    text: str
    reason: str | None
    stop_string: str | None
    logprobs: tuple[float | None, ...]


def read_answer(events: Sequence[TokenEvent]) -> Answer:
    """The answer in ``events``: all so far, in order."""
    counts = [event.completion_tokens for event in events if event.token_id is not None]
    assert counts == list(range(1, len(counts) + 1)), f"tokens were counted {counts}"
    assert all(event.finish_reason is None for event in events[:-1]), "an event after the last one"
    return Answer(
        token_ids=tuple(event.token_id for event in events if event.token_id is not None),
        text="".join(event.text for event in events),
        reason=events[-1].finish_reason if events else None,
        stop_string=events[-1].stop_string if events else None,
        logprobs=tuple(event.logprob for event in events if event.token_id is not None),
    )


def draw_requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts are cut from few texts, so that they share prefixes of all lengths."""
    trunk = [rng.choice(_LETTERS) for _ in range(LONGEST_PROMPT)]
    texts = [
        trunk[:shared] + [rng.choice(_LETTERS) for _ in range(LONGEST_PROMPT - shared)]
        for shared in (0, 0, 8, 16, 19, 32)
    ]
    return [
        Request(tuple(rng.choice(texts)[: rng.randint(1, LONGEST_PROMPT)]), draw_params(rng))
        for _ in range(count)
    ]


def draw_params(rng: random.Random) -> SamplingParams:
    """Any mix of everything that has a say in the text; each is at its default most of the time."""
    fields: dict[str, Any] = {
        "max_tokens": rng.randint(0, LONGEST_ANSWER),
        "seed": rng.getrandbits(64) - 2**63,
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.0, 2.0]),
    }
    drawn: dict[str, Callable[[], Any]] = {
        "top_k": lambda: rng.choice([-1, 1, 3, 20, 200, 1000]),
        "top_p": lambda: rng.choice([0.0, 0.5, 0.9]),
        "min_p": lambda: rng.choice([0.01, 0.3, 1.0]),
        "presence_penalty": lambda: rng.uniform(-2.0, 2.0),
        "frequency_penalty": lambda: rng.uniform(-2.0, 2.0),
        "repetition_penalty": lambda: rng.uniform(0.5, 2.0),
        "logit_bias": lambda: _draw_bias(rng),
        "stop": lambda: _draw_stops(rng),
        "stop_token_ids": lambda: rng.sample(_LETTERS, 3),
        "min_tokens": lambda: rng.randint(1, LONGEST_ANSWER),
        "ignore_eos": lambda: True,
        "logprobs": lambda: True,
    }
    return SamplingParams(**fields, **{name: draw() for name, draw in drawn.items() if rng.random() < 0.2})


def _draw_bias(rng: random.Random) -> dict[int, float]:
    letters = {token_id: rng.choice([-100.0, -3.0, 4.0]) for token_id in rng.sample(_LETTERS, 4)}
    return letters | rng.choice([{}, {EOS: 27.0}, _E_ACUTE])


def _draw_stops(rng: random.Random) -> tuple[str, ...]:
    """Strings of one to three of few characters: many that begin, some that come."""
    return tuple("".join(rng.choices("aeiou", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 4)))


def answer_alone(engine: InferenceEngine, request: Request) -> tuple[Answer, int]:
    """The answer of an engine that has nothing else to do, and how many tokens of the prompt were cached."""
    handle = engine.submit(request.prompt, request.params)
    run_until_idle(engine)
    return read_answer(handle.take()), handle.cached_tokens


def run_until_idle(engine: InferenceEngine, max_steps: int = 10_000) -> None:
    """Step until nothing is left; nothing may be held then."""
    for _ in range(max_steps):
        engine.step()
        stats = engine.get_stats()
        if not stats["active_tasks"] and not stats["waiting_queue"]:
            break
    assert_nothing_held(engine)


def build_scripted(**sizes: Any) -> InferenceEngine:
    """An engine over a scripted model that leaves the sampler a choice; see ``build_engine``."""
    return build_engine(ScriptedModel(spread=SPREAD), **sizes)
