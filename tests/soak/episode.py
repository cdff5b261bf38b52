"""One engine from its first task to its last, driven by a seeded stream of operations."""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from astrai_triton.engine import InferenceEngine, TaskHandle
from astrai_triton.engine.trace import StepTrace
from astrai_triton.errors import (
    AdmissionError,
    ContextLengthError,
    EngineUnavailableError,
    PoolTooSmallError,
    QueueFullError,
)
from random_requests import SPREAD, Answer, Request
from soak.client import Client, is_cursed
from soak.faults import STEP_PLACES, Faults, FaultyCallback, FaultyModel, FaultyTokenizer

MAX_SEQ_LEN = 64
MAX_STEPS_TO_END = 2000
"""Far more than what an episode leaves open can take."""
STEPS_TO_CANCEL = 2

Asked = tuple[Request, Callable[[], Answer]]
"""A request, and what gives its answer alone."""


@attrs.define
class Tally:
    """What happened, over all episodes."""

    num_tasks: int = 0
    num_full_checks: int = 0
    num_leaked_pages: int = 0
    num_preempted: int = 0
    num_evicted: int = 0
    num_refused: int = 0
    differences: list[str] = attrs.field(factory=list)
    num_ended: Counter[str] = attrs.field(factory=Counter)
    num_struck: Counter[str] = attrs.field(factory=Counter)


def draw_sizes(rng: random.Random) -> dict[str, Any]:
    """Small enough that tasks preempt each other and evict prefixes; any request still fits."""
    return {
        "max_batch_size": rng.randint(2, 8),
        "max_step_tokens": rng.randint(8, 32),
        "page_size": rng.choice([4, 4, 2, 1, 8]),
        "n_tokens": rng.choice([56, 56, 56, 80, 160, None]),
        "prefix_cache": rng.random() < 0.8,
        "policy": rng.choice(["budget", "budget", "fcfs"]),
        "max_overtaken": rng.choice([0, 3, 32]),
        "max_queue": rng.randint(4, 16),
        "observer": StepTrace(io.StringIO()) if rng.random() < 0.25 else None,
    }


class Episode:
    """Operations on one engine, each followed by checks.

    Args:
        rng: decides everything.
        universe: requests to draw from.
        tally: is added to.
        check_every: operations from one check of all ownership to the next; what clients see is checked
            after each.
    """

    def __init__(self, rng: random.Random, universe: list[Asked], tally: Tally, check_every: int) -> None:
        self._rng = rng
        self._universe = universe
        self._tally = tally
        self._check_every = check_every
        self._faults = Faults(self._interrupt)
        self._tokenizer = FaultyTokenizer()
        self._engine = InferenceEngine(
            FaultyModel(self._faults, spread=SPREAD),
            self._tokenizer,
            max_seq_len=MAX_SEQ_LEN,
            start=False,
            **draw_sizes(rng),
        )
        self._faults.install(self._engine)
        self._clients: list[Client] = []
        self._num_accepted = 0
        self._num_steps = 0
        self._num_shared_errors = 0
        self._is_shaken = False
        self._operations: list[tuple[Callable[[], None], int]] = [
            (self.arrive, 30),
            (self.step, 40),
            (self.cancel, 6),
            (self.arm_fault, 4),
            (self.read_slowly, 10),
            (self.ask_too_much, 4),
            (self.explain, 3),
            (self.forget_prefixes, 3),
        ]

    def run(self, num_operations: int) -> None:
        """That many operations, then on until every task has ended, then everything is accounted for."""
        functions = [function for function, _ in self._operations]
        weights = [weight for _, weight in self._operations]
        for i, function in enumerate(self._rng.choices(functions, weights, k=num_operations)):
            function()
            self._check_clients()
            if i % self._check_every == 0:
                self._check_ownership()
        self._end()

    # Operations

    def arrive(self) -> None:
        rng = self._rng
        request, answer = rng.choice(self._universe)
        own_faults = {"curse"} if is_cursed(request) else set()
        callback = None
        if rng.random() < 0.08:
            callback = FaultyCallback(rng.randint(1, 14))
            own_faults.add("callback")
        if rng.random() < 0.05:
            self._tokenizer.next_fails_at = rng.randint(1, 14)
            own_faults.add("tokenizer")
        # Nobody else has a salt with a number in it.
        salt = f"s{self._num_accepted}" if rng.random() < 0.1 else rng.choice([None, None, "s"])
        handle = self._submit(request, salt, callback)
        if handle is None:
            return
        client = Client(
            request,
            answer(),
            handle,
            rng.choice(["eager", "eager", "eager", "slow", "late"]),
            frozenset(own_faults),
            callback,
            shares=salt in (None, "s"),
        )
        if rng.random() < 0.03:
            client.leave()
        # One in thirty is forgotten by its client; the engine must not need it.
        if rng.random() > 0.03:
            self._clients.append(client)

    def _submit(
        self, request: Request, salt: str | None, callback: FaultyCallback | None
    ) -> TaskHandle | None:
        """Submit, and be refused only by a full queue."""
        engine = self._engine
        was_full = engine.get_stats()["waiting_queue"] >= engine._scheduler._max_queue
        try:
            handle = engine.submit(
                request.prompt,
                request.params,
                key=self._rng.choice([None, "a", "b"]),
                salt=salt,
                callback=callback,
            )
        except QueueFullError:
            assert was_full
            self._tally.num_refused += 1
            return None
        assert not was_full
        self._num_accepted += 1
        return handle

    def step(self) -> None:
        for _ in range(self._rng.randint(1, 3)):
            self._take_step()

    def _take_step(self) -> None:
        num_broken = self._faults.num_steps_broken
        # As the scheduler's thread does: a fault of the step itself is contained there.
        self._engine._scheduler._try_step()
        self._num_steps += 1
        self._is_shaken = self._faults.num_steps_broken > num_broken

    def cancel(self) -> None:
        if self._clients:
            client = self._rng.choice(self._clients)
            client.handle.cancel()
            client.may_be_cancelled = True
            if client.cancelled_at is None:
                client.cancelled_at = self._num_steps

    def arm_fault(self) -> None:
        # Three steps in a row that fail are the end of an engine, and of the episode.
        if not self._is_shaken:
            self._faults.arm(self._rng)

    def read_slowly(self) -> None:
        for client in self._clients:
            if client.pace == "slow" and self._rng.random() < 0.3:
                self._read(client)

    def ask_too_much(self) -> None:
        engine, params = self._engine, self._universe[0][0].params
        capacity = engine.pool.capacity_tokens
        wanted: type[AdmissionError] = ContextLengthError if capacity == MAX_SEQ_LEN else PoolTooSmallError
        with pytest.raises(wanted):
            engine.submit([97] * capacity, params)

    def explain(self) -> None:
        request, _ = self._rng.choice(self._universe)
        before = self._engine.pool.stats()
        report = self._engine.explain_prefix(request.prompt)
        self._engine._scheduler._run_calls()
        report.result(timeout=0)
        assert self._engine.pool.stats() == before

    def forget_prefixes(self) -> None:
        self._engine.pool.reset_prefixes()

    def _interrupt(self) -> None:
        """What other threads do while a forward runs."""
        chance = self._rng.random()
        if chance < 0.05:
            self.arrive()
        elif chance < 0.08:
            self.cancel()
        elif chance < 0.1:
            self.read_slowly()

    # Checks

    def _check_clients(self) -> None:
        for client in self._clients:
            is_due = (
                client.cancelled_at is not None and self._num_steps >= client.cancelled_at + STEPS_TO_CANCEL
            )
            if is_due or client.pace == "eager":
                self._read(client)
            assert client.has_ended or not is_due, f"cancelled, but not within {STEPS_TO_CANCEL} steps"
        self._settle()

    def _read(self, client: Client) -> None:
        difference = client.read()
        if difference is not None:
            self._tally.differences.append(difference)

    def _settle(self) -> None:
        """Let the clients go that have all they will get."""
        ended = [client for client in self._clients if client.has_ended]
        if not ended:
            return
        self._clients = [client for client in self._clients if not client.has_ended]
        for client in ended:
            client.check_end()
            source = client.end_source
            self._num_shared_errors += source is not None and source not in (*STEP_PLACES, *client.own_faults)
            assert not client.handle.take(), "an event after the last one"

    def _check_ownership(self) -> None:
        self._tally.num_full_checks += 1
        self._engine.pool.check()
        stats = self._engine.get_stats()
        num_pages = stats["pages_free"] + stats["pages_used"] + stats["pages_cached"]
        assert num_pages == stats["pages_total"]
        num_open = stats["active_tasks"] + stats["waiting_queue"]
        assert self._num_accepted == stats["total_tasks"] == sum(stats["finished"].values()) + num_open

    def _end(self) -> None:
        """No fault any more; everybody gets an end, and everything comes back."""
        engine, tally = self._engine, self._tally
        self._faults.disarm()
        for _ in range(MAX_STEPS_TO_END):
            self._take_step()
            stats = engine.get_stats()
            if not stats["active_tasks"] and not stats["waiting_queue"]:
                break
        for client in self._clients:
            self._read(client)
            assert client.has_ended, f"lost: {client.request}"
        self._settle()
        self._check_ownership()
        stats = engine.get_stats()
        struck = self._faults.num_struck
        # A fault that was ordered once ends one task at most; only a fault of the whole step ends all of it.
        assert self._num_shared_errors <= struck.total() - self._faults.num_steps_broken
        assert engine.drain(0), "the engine still counts tasks as open"
        with pytest.raises(EngineUnavailableError):
            engine.submit([97])
        engine.shutdown()
        tally.num_tasks += self._num_accepted
        tally.num_leaked_pages += stats["pages_used"]
        tally.num_preempted += stats["preemptions"]
        tally.num_evicted += stats["evicted_pages"]
        tally.num_ended.update(stats["finished"])
        tally.num_struck.update(struck)
