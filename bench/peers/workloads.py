"""What every peer does, inside its own environment. Standard library only.

Times come from whole calls, so that peers with and without streaming are measured alike: a prompt with one
token of answer gives the prefill, the same with all of them the rest.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

FIRST_ID, LAST_ID = 1000, 40_000
"""Range of the random ids of prompts: ordinary tokens of the default model."""

CHECK_TOKENS = 16


@dataclass(frozen=True)
class Sizes:
    """Tokens and requests of the workloads."""

    prompt: int = 128
    answer: int = 128
    prefill: int = 1024
    batch: int = 16
    clients: int = 8
    repeats: int = 2

    @property
    def context(self) -> int:
        """Tokens of the longest request, with room for a template."""
        return max(self.prompt, self.prefill) + self.answer + 64


class Engine(Protocol):
    """A peer in its process."""

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Answer all prompts at once, greedily, with exactly ``max_tokens`` ids each."""


class WrongAnswerError(Exception):
    """A peer did other work than it was asked to, so that its times would mean nothing."""


def measure(engine: Engine, sizes: Sizes, check_ids: list[int]) -> dict[str, Any]:
    """Run the workloads, each once untimed and then ``sizes.repeats`` times.

    Returns:
        Lists of seconds, one a repetition: ``prefill_s`` (long prompt, one token), ``first_s`` and
        ``single_s`` (short prompt: one token, all tokens), ``batch_s`` (all at once); and ``check``, the ids
        that follow ``check_ids``.

    Raises:
        WrongAnswerError: an answer has another number of tokens.
    """
    draw = random.Random(0)

    def run(num_prompts: int, prompt_len: int, max_tokens: int) -> float:
        # New ids every time: no prefix cache may help.
        prompts = [[draw.randint(FIRST_ID, LAST_ID) for _ in range(prompt_len)] for _ in range(num_prompts)]
        started = time.perf_counter()
        answers = engine.generate(prompts, max_tokens)
        seconds = time.perf_counter() - started
        check_lengths(answers, num_prompts, max_tokens)
        return seconds

    jobs: dict[str, Callable[[], float]] = {
        "prefill_s": lambda: run(1, sizes.prefill, 1),
        "first_s": lambda: run(1, sizes.prompt, 1),
        "single_s": lambda: run(1, sizes.prompt, sizes.answer),
        "batch_s": lambda: run(sizes.batch, sizes.prompt, sizes.answer),
    }
    answers = engine.generate([check_ids], CHECK_TOKENS)
    check_lengths(answers, 1, CHECK_TOKENS)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(sizes.repeats + 1):
        for name, job in jobs.items():
            seconds = job()
            if repeat:
                times[name].append(seconds)
    return {**times, "check": answers[0], "sizes": asdict(sizes)}


def check_lengths(answers: list[list[int]], num_answers: int, max_tokens: int) -> None:
    """Refuse answers that are too many, too few, too long or too short."""
    lengths = [len(answer) for answer in answers]
    if lengths != [max_tokens] * num_answers:
        raise WrongAnswerError(f"wanted {num_answers} answers of {max_tokens} tokens, got lengths {lengths}")
