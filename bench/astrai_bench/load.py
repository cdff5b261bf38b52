"""Streaming requests against a server: a closed loop of clients, or arrivals at a rate."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs

from astrai_bench.errors import BenchError
from astrai_bench.prompts import Prompt, choose_prompt, fit_words, make_words
from astrai_bench.protocols import Answer, EventReader, Protocol, Question

if TYPE_CHECKING:
    import aiohttp

_LAG_PERIOD_S = 0.02


@attrs.frozen(kw_only=True)
class Load:
    """What to send. Either ``clients`` or ``rate`` is set."""

    url: str
    """Of the server, without ``/v1``."""
    protocol: Protocol
    question: Question
    num_requests: int
    num_warmup: int = 0
    """Requests before the measured ones, as many at a time as there are clients, but at most 16."""
    input_tokens: int = 128
    """Of a generated prompt, as the server counts."""
    prompts: Sequence[Prompt] = ()
    """Sent in turn instead of generated ones."""
    clients: int | None = None
    """Closed loop: each sends its next request when it has the answer to the last."""
    rate: float | None = None
    """Open loop: requests a second, with exponential gaps, whatever the server does."""
    seed: int = 0
    timeout_s: float = 600.0
    """Of one request."""
    api_key: str | None = None


@attrs.frozen(kw_only=True)
class Run:
    """The measured requests, and what the measuring itself took. Times as in ``Answer``."""

    answers: tuple[Answer, ...]
    started_s: float
    ended_s: float
    cpu_s: float
    """CPU time of this process, all threads."""
    lags_s: tuple[float, ...]
    """How late the event loop ran a timer: what a measured time may be off by."""
    late_s: tuple[float, ...]
    """Open loop: how long after its time each request was sent."""
    num_words: int | None
    """Of a generated prompt."""


Progress = Callable[[Sequence[Answer], int], None]
"""Told a few times a second: the answers so far, open ones too, and how many are done."""


def draw_arrivals(rate: float, num_requests: int, seed: int) -> tuple[float, ...]:
    """Seconds after the start at which requests are due: a Poisson process, its first at 0."""
    draw = random.Random(seed)
    due, at = [0.0], 0.0
    for _ in range(num_requests - 1):
        at += draw.expovariate(rate)
        due.append(at)
    return tuple(due[:num_requests])


async def run_load(load: Load, progress: Progress = lambda answers, num_done: None) -> Run:
    """Fit the prompts to the server, warm it up, and send the load.

    Raises:
        BenchError: the server cannot be reached, or refuses the first request: then nothing is measured.
    """
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=120)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, trace_configs=[_trace_reuse()]
    ) as session:
        sender = _Sender(load, session)
        await sender.prepare()
        return await sender.measure(progress)


class _Sender:
    def __init__(self, load: Load, session: aiohttp.ClientSession) -> None:
        self._load = load
        self._session = session
        self._url = load.url + load.protocol.path
        self._headers = {"Accept": "text/event-stream", **load.protocol.headers(load.api_key)}
        self._num_words: int | None = None
        self.answers: list[Answer] = []
        self.num_done = 0

    async def prepare(self) -> None:
        """Find the length of a prompt, and let the server get warm."""
        load = self._load
        if load.prompts:
            await self._try(choose_prompt(load.prompts, 0))
        else:
            self._num_words = await fit_words(self._count, load.input_tokens)
        at_once = asyncio.Semaphore(min(load.clients or 16, 16))

        async def warm(idx: int) -> None:
            async with at_once:
                await self._send(self._prompt(idx, "warm-up"))

        await asyncio.gather(*(warm(idx) for idx in range(load.num_warmup)))
        self.answers.clear()
        self.num_done = 0

    async def measure(self, progress: Progress) -> Run:
        """Send everything, in time."""
        lags: list[float] = []
        late: list[float] = []
        watchers = [asyncio.create_task(_watch_lag(lags)), asyncio.create_task(self._tell(progress))]
        started_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            if self._load.rate is not None:
                await self._send_in_time(self._load.rate, started_s, late)
            else:
                await self._send_in_turn(self._load.clients or 1)
        finally:
            for watcher in watchers:
                watcher.cancel()
        ended_s, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        progress(self.answers, self.num_done)
        return Run(
            answers=tuple(self.answers),
            started_s=started_s,
            ended_s=ended_s,
            cpu_s=cpu_s,
            lags_s=tuple(lags),
            late_s=tuple(late),
            num_words=self._num_words,
        )

    async def _send_in_turn(self, num_clients: int) -> None:
        indices = iter(range(self._load.num_requests))

        async def ask() -> None:
            for idx in indices:
                await self._send(self._prompt(idx))

        await asyncio.gather(*(ask() for _ in range(num_clients)))

    async def _send_in_time(self, rate: float, started_s: float, late: list[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for idx, due in enumerate(draw_arrivals(rate, self._load.num_requests, self._load.seed)):
                await asyncio.sleep(started_s + due - time.perf_counter())
                late.append(max(0.0, time.perf_counter() - started_s - due))
                group.create_task(self._send(self._prompt(idx)))

    async def _tell(self, progress: Progress) -> None:
        while True:
            progress(self.answers, self.num_done)
            await asyncio.sleep(0.25)

    def _prompt(self, idx: int, purpose: str = "measured") -> Prompt:
        if self._load.prompts:
            return choose_prompt(self._load.prompts, idx)
        return make_words(self._num_words or self._load.input_tokens, f"{self._load.seed}, {purpose}, {idx}")

    async def _count(self, num_words: int) -> int | None:
        answer = await self._try(make_words(num_words, f"{self._load.seed}, probe, {num_words}"))
        return answer.input_tokens

    async def _try(self, prompt: Prompt) -> Answer:
        answer = await self._send(attrs.evolve(prompt, max_tokens=1))
        # One token may be part of a character, and then no text comes.
        if answer.error not in (None, "no tokens"):
            raise BenchError(
                f"{self._url}: the first request failed, so nothing was measured: {answer.error} "
                f"{answer.detail}".rstrip()
            )
        return answer

    async def _send(self, prompt: Prompt) -> Answer:
        load = self._load
        body = load.protocol.build(load.question, prompt)
        answer = Answer(sent_s=time.perf_counter(), max_tokens=body["max_tokens"])
        self.answers.append(answer)
        await _stream(self._session, self._url, self._headers, body, load.protocol, answer)
        self.num_done += 1
        return answer


async def _stream(
    session: aiohttp.ClientSession,
    url: str,
    headers: dict[str, str],
    body: dict[str, Any],
    protocol: Protocol,
    answer: Answer,
) -> None:
    """Fill ``answer`` from one request; whatever goes wrong is noted in it.

    A server may close a connection just when the next request is sent through it. Clients send it again then,
    and so does this, until it has a new connection.
    """
    import aiohttp

    try:
        while True:
            connection = SimpleNamespace(is_reused=False, is_answered=False)
            try:
                async with session.post(
                    url, json=body, headers=headers, trace_request_ctx=connection
                ) as response:
                    connection.is_answered = True
                    await _judge(response, protocol, answer)
                return
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if connection.is_answered or not connection.is_reused:
                    raise
    except TimeoutError:
        answer.fail("timeout")
    except aiohttp.ClientConnectorError as error:
        answer.fail("cannot connect", error)
    except (aiohttp.ClientError, OSError) as error:
        answer.fail("disconnected", f"{type(error).__name__}: {error}")


def _trace_reuse() -> aiohttp.TraceConfig:
    import aiohttp

    async def note(session: object, context: SimpleNamespace, params: object) -> None:
        context.trace_request_ctx.is_reused = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(note)
    return trace


async def _judge(response: aiohttp.ClientResponse, protocol: Protocol, answer: Answer) -> None:
    if response.status != 200:
        answer.fail(
            f"status {response.status}",
            (await response.content.read(2000)).decode("utf-8", "replace"),
        )
    elif response.content_type != "text/event-stream":
        answer.fail("no event stream", f"content-type {response.content_type}")
    else:
        await _read(response.content, protocol, answer)


async def _read(content: aiohttp.StreamReader, protocol: Protocol, answer: Answer) -> None:
    events, is_last = EventReader(), False
    async for data in content.iter_any():
        now = time.perf_counter()
        for event in events.push(data):
            is_last = protocol.read(answer, event, now) or is_last
        answer.done_s = now
    if not is_last:
        answer.fail("broken off", "the stream ended without its last event")
    elif not answer.chunks_s:
        answer.fail("no tokens", "the answer has no text")


async def _watch_lag(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        lags.append(time.perf_counter() - due)
