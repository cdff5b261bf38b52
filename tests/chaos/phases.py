"""What is done to the server while the canaries sing."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable

from chaos.attacks import ATTACKS, PATHS, Attack, Target, UnexpectedError, leave_early, make_chat, require
from chaos.client import Client, encode, fetch, format_request
from chaos.reply import read_reply
from chaos.run import WIDTH, Run
from chaos.traps import SLOW, TRAPS

Phase = Callable[[Run], Awaitable[None]]

_REFUSALS = {"context_length_exceeded", "kv_pool_exceeded", "chat_template_refused", "unsupported"}
_MIB = 1 << 20


async def schemas(run: Run) -> None:
    """Bodies that the document accepts, refuses, and damaged ones."""
    num_answered = 0

    async def send(rng: random.Random, path: str, data: bytes, what: str, allowed: set[int]) -> None:
        nonlocal num_answered
        client = await Client.open(run.server.port)
        try:
            await client.send(format_request("POST", path, data))
            answer = await client.read_answer()
            run.tally.num_requests += 1
            require(answer, allowed, f"{what} {path} {data[:1500]!r}")
            if answer.status == 400 and what == "valid" and answer.json["error"]["code"] not in _REFUSALS:
                raise UnexpectedError(f"{path} {data[:1500]!r}: {answer.body!r}")
            if answer.status == 200 and path in PATHS:
                num_answered += what == "valid"
                if read_reply(answer).finish is None:
                    raise UnexpectedError(f"{path} {data[:1500]!r}: the answer ends with an error")
        finally:
            client.close()

    def make_job(i: int) -> Callable[[], Awaitable[None]]:
        async def job() -> None:
            rng = run.make_rng(i)
            path = rng.choice([*sorted(run.generator.bodies), *PATHS * 3])
            kind = ("valid", "invalid", "damaged")[i % 3]
            run.tally.num_bad_inputs += kind != "valid"
            if kind == "valid":
                data = encode(run.generator.make_valid(rng, path))
                # A request of many choices may be more than the queue takes.
                await run.attempt(i, send(rng, path, data, kind, {200, 400, 422, 429}))
            elif kind == "invalid":
                body, place = run.generator.make_invalid(rng, path)
                await run.attempt(i, send(rng, path, encode(body), f"invalid at {place}", {400, 422}))
            else:
                data = run.generator.make_damaged(rng, path)
                await run.attempt(i, send(rng, path, data, kind, {200, 400, 413, 422}))

        return job

    count = 5000 * run.scale
    await run.spread([make_job(i) for i in range(count)])
    if num_answered < count // 18:
        run.tally.blame(f"only {num_answered} of {count // 3} valid bodies were answered: they test little")


async def connections(run: Run) -> None:
    """Everything of ``attacks``, mixed."""
    attacks = [attack for attack, count in ATTACKS for _ in range(count * run.scale)]
    run.make_rng(-1).shuffle(attacks)
    await run.spread([_make_attack(run, attack, i) for i, attack in enumerate(attacks)], 2 * WIDTH)
    if b"left its stream unread" not in run.server.log.read_bytes():
        run.tally.blame("nobody who does not read was cut off")


def _make_attack(run: Run, attack: Attack, i: int) -> Callable[[], Awaitable[None]]:
    async def job() -> None:
        run.tally.num_bad_inputs += 1
        target = Target(run.server.port, run.make_rng(i), run.generator)

        async def count() -> None:
            # Not in one line: the sum must be of what others have counted meanwhile, too.
            answered = await attack(target)
            run.tally.num_requests += answered

        await run.attempt(i, count(), attack.__name__)

    return job


async def flood(run: Run) -> None:
    """More requests at once than the queue takes: a 429 that says when to come back, and no lost answer."""
    statuses: list[int] = []

    async def ask(i: int) -> None:
        path, body = make_chat(run.make_rng(i), max_tokens=24)
        if i < 10:
            # While these run, the queue cannot empty as fast as it fills.
            body = encode({"messages": [{"role": "user", "content": SLOW}], "max_tokens": 40})
        client = await Client.open(run.server.port)
        try:
            await client.send(format_request("POST", path, body))
            answer = await client.read_answer()
            require(answer, {200, 429}, "one of very many")
            statuses.append(answer.status)
            run.tally.num_requests += 1
        finally:
            client.close()

    run.flock.may_get = frozenset({429})
    count = 120
    await asyncio.gather(*(run.attempt(i, ask(i)) for i in range(count)))
    run.flock.may_get = frozenset()
    run.tally.num_bad_inputs += statuses.count(429)
    if len(statuses) != count or 429 not in statuses or statuses.count(200) < 64:
        run.tally.blame(f"{len(statuses)} of {count} answered, {statuses.count(429)} of them with 429")


async def faults(run: Run) -> None:
    """Faults that belong to one request end that one, in every place; the canaries do not feel them."""
    marks = [mark for mark in TRAPS for _ in range(60 * run.scale)]
    run.make_rng(-1).shuffle(marks)

    async def ask(i: int, mark: str) -> None:
        rng = run.make_rng(i)
        text = "x" * rng.randint(0, 90) + f"@{mark}@" + "y" * rng.randint(0, 40)
        is_stream, path = rng.random() < 0.5, rng.choice(PATHS)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 30, "temperature": 0}
        answer = await fetch(run.server.port, "POST", path, body | {"stream": is_stream, "ignore_eos": True})
        run.tally.num_requests += 1
        run.tally.num_faults += 1
        require(answer, {200, 500} if is_stream else {500}, f"a fault in {mark}")
        if answer.status == 200 and read_reply(answer).finish is not None:
            raise UnexpectedError(f"a fault in {mark} was not felt")

    def make_job(i: int, mark: str) -> Callable[[], Awaitable[None]]:
        return lambda: run.attempt(i, ask(i, mark))

    await run.spread([make_job(i, mark) for i, mark in enumerate(marks)])


async def steps(run: Run) -> None:
    """A step that fails ends the tasks at hand; the loop goes on."""
    run.flock.may_get = frozenset({500})
    for i, count in enumerate((1, 2) * (2 * run.scale)):
        await run.server.ask("fail_steps", count=count)
        run.tally.num_faults += count

        async def ask(i: int = i) -> None:
            path, body = make_chat(run.make_rng(i))
            require(await fetch(run.server.port, "POST", path, json.loads(body)), {200}, "after failed steps")
            run.tally.num_requests += 1

        await run.attempt(i, ask())
    # What was begun before the last fault ends with it.
    await run.flock.stop()
    run.flock.may_get = frozenset()
    run.flock.start(run.server.port)


async def memory(run: Run) -> None:
    """Many requests, half of them given up: nothing of them may stay."""
    await _burst(run, 0, 150)
    await run.flock.stop()
    await run.settle()
    before, objects = run.server.measure_memory(), (await run.server.ask("audit"))["objects"]
    count = min(5000, 2500 * run.scale)
    await _burst(run, 1, count)
    await run.settle()
    grown = run.server.measure_memory() - before
    grown_objects = (await run.server.ask("audit"))["objects"] - objects
    print(f"  {count} requests: {grown / _MIB:+.1f} MiB, {grown_objects:+d} objects", flush=True)  # noqa: T201
    # A request that stays keeps dozens of objects. Full and empty prefix caches differ by a few per page.
    if grown_objects > max(1000, count // 4):
        run.tally.blame(f"{grown_objects} objects more after {count} requests")
    # The objects of one request take over 10 KiB; an allocator's arenas come and go by the MiB.
    limit = 8 * _MIB + count * 2048
    if grown > limit:
        run.tally.blame(
            f"{grown / _MIB:.1f} MiB more after {count} requests, wanted {limit / _MIB:.1f} at most"
        )
    run.flock.start(run.server.port)


async def _burst(run: Run, which: int, count: int) -> None:
    async def ask(i: int) -> None:
        rng = run.make_rng(which * 1_000_000 + i)
        if i % 2:
            run.tally.num_bad_inputs += 1
            await leave_early(Target(run.server.port, rng, run.generator))
            return
        path, body = make_chat(rng, max_tokens=8)
        client = await Client.open(run.server.port)
        try:
            await client.send(format_request("POST", path, body))
            require(await client.read_answer(), {200}, "an honest request")
            run.tally.num_requests += 1
        finally:
            client.close()

    def make_job(i: int) -> Callable[[], Awaitable[None]]:
        return lambda: run.attempt(i, ask(i))

    await run.spread([make_job(i) for i in range(count)])


PHASES: tuple[Phase, ...] = (schemas, connections, flood, faults, memory, steps)
