"""Canaries: fixed requests that run all the time, and whose answers must be those they got alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import attrs

from chaos.client import BrokenAnswerError, Client, ClosedError, encode, format_request
from chaos.reply import Reply, find_fault, read_reply
from chaos.tally import Tally

PAUSE_S = 0.05
"""Between two answers of a canary: the machine is needed for the attacks too."""

_CHAT, _MESSAGES = "/v1/chat/completions", "/v1/messages"
SYSTEM = "You are a canary. Sing the same song every time."


@attrs.frozen
class Canary:
    """One request."""

    path: str
    body: dict[str, Any]

    @property
    def data(self) -> bytes:
        """As bytes."""
        return format_request("POST", self.path, encode(self.body))


def _ask(path: str, text: str, **fields: Any) -> Canary:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "temperature": 0} | fields
    if path == _MESSAGES:
        body["system"] = SYSTEM
    else:
        body["messages"].insert(0, {"role": "system", "content": SYSTEM})
    return Canary(path, body)


CANARIES = (
    _ask(_CHAT, "one", max_tokens=40, ignore_eos=True),
    _ask(_CHAT, "two, of the same beginning", max_tokens=48, ignore_eos=True, stream=True),
    _ask(_CHAT, "three", max_tokens=40, temperature=1, seed=7),
    _ask(_CHAT, "four, and hot", max_tokens=40, temperature=2, seed=-1, top_p=0.9, stream=True),
    _ask(_MESSAGES, "five", max_tokens=60),
    _ask(_MESSAGES, "six " + "x" * 70, max_tokens=32, stream=True, stop_sequences=["zq", "aa"]),
)
"""Both protocols, whole and streamed, greedy and seeded, up to a limit, an end of turn or a stop string."""


class Flock:
    """The canaries and the tasks that keep them singing.

    Args:
        tally: told of every answer.
        canaries: the requests.
    """

    def __init__(self, tally: Tally, canaries: Sequence[Canary] = CANARIES) -> None:
        self._tally = tally
        self._canaries = canaries
        self._expected: list[Reply] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self.may_get: frozenset[int] = frozenset()
        """Statuses of errors that are to be expected, 500 for one in a stream; a wrong text never is."""

    async def learn(self, port: int) -> None:
        """Ask each canary alone, for what it must always answer."""
        for canary in self._canaries:
            client = await Client.open(port)
            await client.send(canary.data)
            answer = await client.read_answer()
            client.close()
            if answer.status != 200:
                raise RuntimeError(f"a canary alone: wanted 200, got {answer.status} {answer.body!r}")
            self._expected.append(read_reply(answer))

    def start(self, port: int) -> None:
        """Let all of them sing."""
        self._is_stopping = False
        self._tasks = [asyncio.create_task(self._sing(port, i)) for i in range(len(self._canaries))]

    async def stop(self) -> None:
        """Let each finish its answer."""
        self._is_stopping = True
        await asyncio.gather(*self._tasks)
        self._tasks = []

    def cancel(self) -> None:
        """End them at once."""
        for task in self._tasks:
            task.cancel()

    async def _sing(self, port: int, i: int) -> None:
        client: Client | None = None
        while not self._is_stopping:
            try:
                client = client or await Client.open(port)
                await client.send(self._canaries[i].data)
                if not await self._check(client, i):
                    client.close()
                    client = None
            except (ClosedError, BrokenAnswerError, ConnectionError, TimeoutError) as error:
                self._tally.blame(f"canary {i + 1}: {error!r}")
                if client is not None:
                    client.close()
                client = None
            await asyncio.sleep(PAUSE_S)
        if client is not None:
            client.close()

    async def _check(self, client: Client, i: int) -> bool:
        """Read one answer; whether the connection may be used again."""
        answer = await client.read_answer()
        self._tally.num_requests += 1
        fault = find_fault(answer)
        if fault is not None:
            self._tally.blame(f"canary {i + 1}: {fault}")
        if answer.status != 200:
            self._fail(i, answer.status, f"{answer.status} {answer.body[:200]!r}")
            return False
        reply = read_reply(answer)
        if reply.finish is None:
            self._fail(i, 500, f"an error after {reply.text!r}")
            return False
        self.compare(i, reply)
        return True

    def compare(self, i: int, reply: Reply) -> None:
        """Count an answer, and whether it differs."""
        self._tally.num_canary_answers += 1
        if reply != self._expected[i]:
            self._tally.num_canary_differences += 1
            self._tally.blame(f"canary {i + 1}: wanted {self._expected[i]}, got {reply}")

    def _fail(self, i: int, status: int, what: str) -> None:
        if status in self.may_get:
            self._tally.num_canary_errors += 1
        else:
            self._tally.blame(f"canary {i + 1}: {what}")
