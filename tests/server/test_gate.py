"""The engine as the routes see it."""

from __future__ import annotations

import asyncio
import time

import pytest

from astrai_server.gate import EngineGate
from astrai_server.problem import KeyLimitError
from astrai_triton.errors import EngineUnavailableError
from fake_engine import FakeEngine


def refuse(gate: EngineGate) -> str:
    with pytest.raises(EngineUnavailableError) as caught, gate.enter():
        pass
    assert gate.num_inside == 0
    return str(caught.value)


def test_a_gate_is_loading_until_it_is_opened() -> None:
    gate = EngineGate()
    assert gate.state == "loading"
    assert refuse(gate) == "Engine not initialized"
    engine = FakeEngine()
    gate.open(engine)  # type: ignore[arg-type]
    assert gate.state == "ready"
    with gate.enter() as inside:
        assert inside is engine
        assert gate.num_inside == 1
    assert gate.num_inside == 0


def test_a_draining_gate_lets_nobody_in() -> None:
    gate = EngineGate(FakeEngine())  # type: ignore[arg-type]
    with gate.enter():
        gate.drain()
        assert gate.state == "draining"
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            gate.enter().__enter__()
        assert gate.num_inside == 1


def test_an_engine_that_died_is_dead() -> None:
    engine = FakeEngine()
    gate = EngineGate(engine)  # type: ignore[arg-type]
    engine.is_alive = False
    assert gate.state == "dead"
    assert "dead" in refuse(gate)
    assert gate.engine is engine


def test_a_request_that_fails_leaves_the_gate() -> None:
    gate = EngineGate(FakeEngine())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError), gate.enter():
        raise RuntimeError
    assert gate.num_inside == 0


def test_idle_is_when_the_last_one_has_left() -> None:
    async def run() -> None:
        gate = EngineGate(FakeEngine())  # type: ignore[arg-type]
        await asyncio.wait_for(gate.wait_idle(), 1)
        with gate.enter():
            with gate.enter():
                pass
            waiting = asyncio.ensure_future(gate.wait_idle())
            await asyncio.sleep(0)
            assert not waiting.done()
        await asyncio.wait_for(waiting, 1)

    asyncio.run(run())


def test_a_key_is_let_in_so_often_and_no_more() -> None:
    gate = EngineGate(FakeEngine(), max_per_key=2)  # type: ignore[arg-type]
    with gate.enter("a"), gate.enter("a"), gate.enter("b"), gate.enter():
        with pytest.raises(KeyLimitError, match="this API key has 2 requests here"):
            gate.enter("a").__enter__()
        assert gate.num_inside == 4
    with gate.enter("a"):
        assert gate.num_inside == 1


def test_who_has_no_key_is_not_limited() -> None:
    gate = EngineGate(FakeEngine(), max_per_key=1)  # type: ignore[arg-type]
    with gate.enter(), gate.enter():
        assert gate.num_inside == 2


def test_the_time_to_retry_follows_how_long_requests_take() -> None:
    gate = EngineGate(FakeEngine(), max_per_key=1)  # type: ignore[arg-type]
    with gate.enter("a"):
        time.sleep(0.1)
    with gate.enter("a"), pytest.raises(KeyLimitError) as caught:
        gate.enter("a").__enter__()
    assert 0.1 <= caught.value.retry_after_s < 5
