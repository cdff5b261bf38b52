"""Episode after episode, until enough operations were done."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import attrs

from astrai_triton.engine import InferenceEngine
from random_requests import Answer, Request, answer_alone, build_scripted, draw_requests
from soak.episode import Asked, Episode, Tally
from soak.faults import CURSED_FROM

OPERATIONS_PER_EPISODE = 2000
NUM_REQUESTS = 600
CURSED_SHARE = 0.04


def live(num_operations: int, seed: int, check_every: int) -> Tally:
    """Do ``num_operations`` operations; the same seed does the same.

    Raises:
        AssertionError: ownership, counters or the end of a task are wrong; names the episode.
    """
    rng = random.Random(seed)
    tally = Tally()
    universe = draw_universe(rng)
    with silence():
        for start in range(0, num_operations, OPERATIONS_PER_EPISODE):
            try:
                episode = Episode(random.Random(rng.getrandbits(64)), universe, tally, check_every)
                episode.run(min(OPERATIONS_PER_EPISODE, num_operations - start))
            except AssertionError as error:
                error.add_note(f"seed {seed}, operations from {start}")
                raise
    return tally


def draw_universe(rng: random.Random) -> list[Asked]:
    """Requests, and the answer of each alone, found out when it is first wanted."""
    engine = build_scripted(n_tokens=128)
    requests = [curse(rng, request) for request in draw_requests(rng, NUM_REQUESTS)]
    return [(request, cache(partial(find_answer, engine, request))) for request in requests]


def curse(rng: random.Random, request: Request) -> Request:
    """A few are cursed: they get an answer alone in an engine without faults only."""
    if rng.random() >= CURSED_SHARE:
        return request
    first = CURSED_FROM + rng.randint(0, 40)
    return attrs.evolve(request, prompt=(first, *request.prompt[1:]))


def find_answer(engine: InferenceEngine, request: Request) -> Answer:
    engine.pool.reset_prefixes()
    answer, num_cached = answer_alone(engine, request)
    assert num_cached == 0
    return answer


@contextmanager
def silence() -> Iterator[None]:
    """Every injected fault would be logged with its traceback."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
