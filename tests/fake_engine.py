"""An engine without a model: every task gets the same scripted pieces, at the pace a test wants."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
import attrs

from astrai_server.config import ApiSettings, CacheSettings, LimitSettings, ServerSettings, Settings
from astrai_server.gate import EngineGate
from astrai_server.keys import KeyRing
from astrai_server.run import listen
from astrai_triton.cache import PoolStats
from astrai_triton.engine.params import SamplingParams
from astrai_triton.engine.result import TaskHandle, TokenEvent, wake_readers
from astrai_triton.engine.stats import StepHistogram, StepStats, describe_stats
from astrai_triton.errors import ContextLengthError
from astrai_triton.grammar import Grammar
from fakes import ByteTokenizer, ScriptedModel

_T = TypeVar("_T")


class FakeEngine:
    """Posts ``pieces`` to every task as one token each, then the end.

    Args:
        pieces: text of each token; "" is a token that releases no text.
        finish: how the answer ends.
        stop_string: with finish "stop", the string that matched.
        error: with finish "error".
        cached_tokens: prompt tokens said to be cached.
        refuse: raised by every ``submit``.
        gap_s: pause before each token.
        starts: whether the task begins; else it ends at once.
    """

    vocab_size = 260
    model_name = "astrai"

    def __init__(
        self,
        pieces: Sequence[str] = ("Hel", "lo"),
        *,
        finish: str = "stop",
        stop_string: str | None = None,
        error: Exception | None = None,
        cached_tokens: int = 0,
        refuse: Exception | None = None,
        gap_s: float = 0.0,
        starts: bool = True,
        max_seq_len: int = 4096,
    ) -> None:
        self.pieces = pieces
        self.finish = finish
        self.stop_string = stop_string
        self.error = error
        self.cached_tokens = cached_tokens
        self.refuse = refuse
        self.gap_s = gap_s
        self.starts = starts
        self.max_seq_len = max_seq_len
        self.tokenizer = ByteTokenizer()
        self.model = ScriptedModel()
        self.pool = SimpleNamespace(stats=lambda: PoolStats(*(0,) * 7))
        self.is_alive = True
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.owners: list[tuple[str | None, str | None]] = []
        """Key and salt of every task."""
        self.num_cancelled = 0
        self.is_held = False
        """Tasks stop before their last piece until this is False again."""
        self._runs: set[asyncio.Task[None]] = set()

    def room_for(self, prompt_len: int) -> int:
        if prompt_len >= self.max_seq_len:
            raise ContextLengthError(prompt_len, self.max_seq_len)
        return self.max_seq_len - prompt_len

    def submit_many(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        n: int = 1,
        request_id: str | None = None,
        key: str | None = None,
        salt: str | None = None,
    ) -> list[TaskHandle]:
        if self.refuse is not None:
            raise self.refuse
        return [self._submit(prompt, params, request_id, key, salt) for prompt in prompts for _ in range(n)]

    def _submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        key: str | None,
        salt: str | None,
    ) -> TaskHandle:
        self.prompts.append(bytes(prompt_ids).decode(errors="replace"))
        self.params.append(params)
        self.owners.append((key, salt))
        cancelled = asyncio.Event()
        handle = TaskHandle(request_id or "task", len(prompt_ids), params, cancelled.set)
        run = asyncio.get_running_loop().create_task(self._run(handle, cancelled))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        return handle

    def compile_grammar(self, grammar: Grammar) -> None:
        """Every grammar is fine, and none changes the pieces."""

    async def _run(self, handle: TaskHandle, cancelled: asyncio.Event) -> None:
        await asyncio.sleep(0)
        if self.starts:
            handle.mark_started(self.cached_tokens)
            wake_readers([handle])
        for i, piece in enumerate(self.pieces if self.starts else ()):
            await asyncio.sleep(self.gap_s)
            while self.is_held and i == len(self.pieces) - 1 and self.is_alive and not cancelled.is_set():
                await asyncio.sleep(0.001)
            if cancelled.is_set() or not self.is_alive:
                self.num_cancelled += cancelled.is_set()
                self._post(handle, i, finish_reason="cancelled")
                return
            self._post(handle, i + 1, text=piece, token_id=i)
        self._post(
            handle,
            len(self.pieces),
            finish_reason=self.finish,
            stop_string=self.stop_string,
            error=self.error,
        )

    def _post(self, handle: TaskHandle, completion_tokens: int, **fields: Any) -> None:
        handle.post(
            TokenEvent(cached_tokens=self.cached_tokens, completion_tokens=completion_tokens, **fields)
        )
        wake_readers([handle])

    def get_stats(self) -> dict[str, Any]:
        return describe_stats(StepStats(total_tasks=len(self.prompts)), self.pool.stats(), (), 0)

    def step_histogram(self) -> StepHistogram:
        return StepStats().histogram()

    def shutdown(self) -> None:
        self.is_alive = False


def build_settings(**options: Any) -> Settings:
    """Settings for a free port; ``options`` go to the section that has them."""
    sections: dict[str, dict[str, Any]] = {}
    for name, section in (
        ("limits", LimitSettings),
        ("api", ApiSettings),
        ("server", ServerSettings),
        ("cache", CacheSettings),
    ):
        known = {field.name for field in attrs.fields(section)}
        sections[name] = {key: options.pop(key) for key in list(options) if key in known}
    assert not options
    return Settings(
        limits=LimitSettings(**sections["limits"]),
        api=ApiSettings(**sections["api"]),
        cache=CacheSettings(**sections["cache"]),
        server=ServerSettings(**({"port": 0} | sections["server"])),
    )


@attrs.frozen
class Answer:
    """A response that was read to its end."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def frames(self) -> list[str]:
        """Frames of an event stream; fails unless each ends with an empty line."""
        text = self.body.decode("ascii")
        assert text.endswith("\n\n")
        return text[:-2].split("\n\n")


@attrs.define
class Client:
    """Sends requests to one server."""

    session: aiohttp.ClientSession
    url: str
    gate: EngineGate

    async def send(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, self.url + path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """``body`` is sent as it is if it is bytes, else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | dict(headers or {})
        return await self.send("POST", path, data=data, headers=headers)

    async def chat(self, content: Any = "hi", **fields: Any) -> Answer:
        """One user message to the OpenAI route."""
        return await self.post("/v1/chat/completions", chat_body(content, **fields))

    async def message(self, content: Any = "hi", **fields: Any) -> Answer:
        """One user message to the Anthropic route."""
        return await self.post("/v1/messages", chat_body(content, **fields))


def chat_body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    """A body with one user message that both protocols accept."""
    return {"messages": [{"role": "user", "content": content}]} | fields


@asynccontextmanager
async def serve(
    engine: Any, settings: Settings | None = None, keys: KeyRing | None = None
) -> AsyncIterator[Client]:
    """A real server on a loopback port; ``engine`` None is one that still loads."""
    settings = settings or build_settings()
    gate = EngineGate(engine, max_per_key=settings.limits.max_requests_per_key)
    async with listen(settings, gate, keys) as urls, aiohttp.ClientSession() as session:
        yield Client(session, urls[0], gate)


def ask(
    engine: Any,
    use: Callable[[Client], Coroutine[Any, Any, _T]],
    settings: Settings | None = None,
    keys: KeyRing | None = None,
) -> _T:
    """Run ``use`` against a server over ``engine``."""

    async def run() -> _T:
        async with serve(engine, settings, keys) as client:
            return await use(client)

    return asyncio.run(run())


@contextmanager
def serve_in_thread(
    engine: Any, settings: Settings | None = None, keys: KeyRing | None = None
) -> Iterator[str]:
    """A server in a thread of its own, for clients that block; yields its URL."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    started = threading.Event()
    urls: list[str] = []

    async def run() -> None:
        async with listen(settings or build_settings(), EngineGate(engine), keys) as listening:
            urls.extend(listening)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()
        loop.close()
