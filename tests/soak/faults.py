"""Faults to order, at every place where a step calls something that may fail."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

from astrai_triton.engine import InferenceEngine, TokenEvent
from fakes import ByteDetokenizer, ByteTokenizer, Context, ScriptedModel

Place = Literal["forward", "memory", "logits", "sampler", "extend", "open", "record", "refill", "decode"]
PLACES: tuple[Place, ...] = get_args(Place)
STEP_PLACES: tuple[Place, ...] = ("refill", "decode")
"""Outside of any task: the whole step fails, before or after its prefills."""

CURSED_FROM = 200
"""A prompt that begins with this token or a later one makes every forward fail that sees so many of its
tokens more than ``MERCY``."""
MERCY = 190


class InjectedError(RuntimeError):
    """Ordered by the soak. ``source`` is a place, or what belongs to the one task that may end of it."""

    def __init__(self, source: str) -> None:
        super().__init__(f"injected: {source}")
        self.source = source


class FaultyModel(ScriptedModel):
    """A scripted model that fails where it is told to: as a whole, or by NaN in one row of logits."""

    def __init__(self, faults: Faults, **options: Any) -> None:
        super().__init__(on_forward=faults.look_at, **options)
        self._faults = faults

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = super().__call__(*args, **kwargs)
        if len(logits) and self._faults.strike("logits"):
            logits[len(logits) // 2, 100] = float("nan")
        return logits


class FaultyTokenizer(ByteTokenizer):
    """Hands out detokenizers that fail at a token, to order."""

    def __init__(self) -> None:
        self.next_fails_at: int | None = None

    def detokenizer(self) -> ByteDetokenizer:
        fails_at, self.next_fails_at = self.next_fails_at, None
        return ByteDetokenizer() if fails_at is None else FaultyDetokenizer(fails_at)


class FaultyDetokenizer(ByteDetokenizer):
    """Fails at push number ``fails_at``, counted from 1."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self._num_left = fails_at

    def push(self, token_id: int) -> str:
        self._num_left -= 1
        if not self._num_left:
            raise InjectedError("tokenizer")
        return super().push(token_id)


class FaultyCallback:
    """Fails at event number ``fails_at``, counted from 1."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.num_events = 0

    def __call__(self, event: TokenEvent) -> None:
        self.num_events += 1
        if self.num_events == self.fails_at:
            raise InjectedError("callback")


class Faults:
    """What is armed, and what has struck.

    Args:
        interrupt: called in the middle of every forward: other threads do not wait for the end of a step.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._armed = Counter[Place]()
        self._interrupt = interrupt
        self.num_struck = Counter[Place]()

    def arm(self, rng: random.Random) -> None:
        """One to three faults in a row at one place; the step itself fails once."""
        place = rng.choice(PLACES)
        self._armed[place] = 1 if place in STEP_PLACES else rng.randint(1, 3)

    def disarm(self) -> None:
        self._armed.clear()

    @property
    def num_steps_broken(self) -> int:
        return sum(self.num_struck[place] for place in STEP_PLACES)

    def strike(self, place: Place) -> bool:
        """Whether the call that is being made at ``place`` is to fail."""
        if not self._armed[place]:
            return False
        self._armed[place] -= 1
        self.num_struck[place] += 1
        return True

    def look_at(self, contexts: list[Context]) -> None:
        """Of a forward."""
        self._interrupt()
        for context in contexts:
            if context[0] >= CURSED_FROM and len(context) > context[0] - MERCY:
                raise InjectedError("curse")
        if self.strike("memory"):
            raise MemoryError("injected")
        if self.strike("forward"):
            raise InjectedError("forward")

    def install(self, engine: InferenceEngine) -> None:
        """Put the faults of pool, sampler and step into their places."""
        stepper, pool = engine._scheduler._stepper, engine.pool
        runner = stepper._runner
        replaced: list[tuple[object, str, Place]] = [
            (pool, "extend", "extend"),
            (pool, "open", "open"),
            (pool, "record", "record"),
            (stepper, "_refill", "refill"),
            (stepper, "_decode", "decode"),
        ]
        for owner, name, place in replaced:
            setattr(owner, name, self._fail_before(getattr(owner, name), place))
        for name in ("run", "decode"):
            # The sampler comes last there: K and V are written, and no task has moved.
            setattr(runner, name, self._fail_after(getattr(runner, name), "sampler"))

    def _fail_before(self, function: Callable[..., Any], place: Place) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self.strike(place):
                raise InjectedError(place)
            return function(*args)

        return call

    def _fail_after(self, function: Callable[..., Any], place: Place) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = function(*args)
            if self.strike(place):
                raise InjectedError(place)
            return result

        return call
