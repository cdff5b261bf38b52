"""The server under attack: a scripted model behind the real scheduler, cache, sampler and HTTP.

Run as ``python -m chaos.server``. A request whose text holds a mark such as ``@forward@`` springs that trap.
Steps that fail, and what the harness wants to know, are asked for on standard input, one JSON object a line,
and answered on standard output. The end of standard input ends the process.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch

from astrai_server.config import ApiSettings, LimitSettings, ServerSettings, Settings
from astrai_server.run import run_server
from astrai_triton.cache import Lease
from astrai_triton.engine import InferenceEngine
from astrai_triton.kvcache import KVCache
from chaos.traps import HEADER_TIMEOUT_S, MAX_BODY_BYTES, READ_TIMEOUT_S, SLOW_STEP_S, find_trap
from fakes import EOS, ByteDetokenizer, ByteTokenizer, Context, ScriptedModel, hash_script

PAGE_SIZE = 4
NUM_PAGES = 96
"""A full batch of canaries alone wants more: tasks are preempted and prefixes evicted all the time."""
MAX_BATCH_SIZE = 8
MAX_QUEUE = 64

_SILENT = 259
"""A token without text; three of them in a row do not happen but on purpose."""

SETTINGS = Settings(
    server=ServerSettings(port=0),
    api=ApiSettings(debug=True),
    limits=LimitSettings(
        max_body_bytes=MAX_BODY_BYTES,
        header_timeout_s=HEADER_TIMEOUT_S,
        body_timeout_s=READ_TIMEOUT_S,
        write_timeout_s=READ_TIMEOUT_S,
        drain_timeout_s=60,
    ),
)


class InjectedError(RuntimeError):
    """A fault on purpose; its text must reach no client."""


class TrappedTokenizer(ByteTokenizer):
    """Fails for marked conversations, and in the middle of marked answers."""

    def encode_chat(self, messages: Sequence[Any], **options: Any) -> list[int]:
        token_ids = super().encode_chat(messages, **options)
        if find_trap(token_ids) == "tokenizer":
            raise InjectedError("injected into the tokenizer")
        return token_ids

    def detokenizer(self) -> ByteDetokenizer:
        return TrappedDetokenizer()


class TrappedDetokenizer(ByteDetokenizer):
    """Fails at the third silent token in a row."""

    def __init__(self) -> None:
        super().__init__()
        self._num_silent = 0

    def push(self, token_id: int) -> str:
        self._num_silent = self._num_silent + 1 if token_id == _SILENT else 0
        if self._num_silent == 3:
            raise InjectedError("injected into the detokenizer")
        return super().push(token_id)


class TrappedModel(ScriptedModel):
    """Ends turns now and then; fails, or gives NaN, for marked prompts, from their second token on."""

    def __init__(self) -> None:
        super().__init__(_script, on_forward=self._spring)
        self._poisoned: list[bool] = []

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, logits_rows: torch.Tensor
    ) -> torch.Tensor:
        logits = super().__call__(token_ids, positions, kv_cache, logits_rows)
        starts = kv_cache.qo_indptr.tolist()
        for i, row in enumerate(logits_rows.tolist()):
            if self._poisoned[bisect_right(starts, row) - 1]:
                logits[i, 0] = float("nan")
        return logits

    def _spring(self, contexts: list[Context]) -> None:
        traps = [find_trap(context) for context in contexts]
        if "forward" in traps:
            raise InjectedError("injected into a forward")
        if "memory" in traps:
            raise MemoryError("injected into a forward")
        if "slow" in traps:
            time.sleep(SLOW_STEP_S)
        self._poisoned = [trap == "nan" for trap in traps]


def _script(context: Context) -> int:
    trap = find_trap(context)
    if trap == "detokenizer":
        return _SILENT
    token_id = hash_script(context)
    # One in 26 ends the turn: both finish reasons occur. Not before a trap was reached, though.
    return EOS if token_id == 122 and trap is None else token_id


class Control:
    """What the harness may do to the server beside HTTP."""

    def __init__(self) -> None:
        self.engine: InferenceEngine | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._num_step_faults = 0

    def load(self) -> InferenceEngine:
        """Make the engine and set the traps around it."""
        engine = InferenceEngine(
            TrappedModel(),
            TrappedTokenizer(),
            max_batch_size=MAX_BATCH_SIZE,
            page_size=PAGE_SIZE,
            n_tokens=NUM_PAGES * PAGE_SIZE,
            max_seq_len=512,
            max_step_tokens=64,
            max_queue=MAX_QUEUE,
            model_name="scripted",
        )
        extend = engine.pool.extend

        def trap_extend(lease: Lease, num_tokens: int) -> None:
            for task in engine._scheduler.running:
                if task.lease is lease and task.num_generated >= 2 and find_trap(task.tokens) == "alloc":
                    raise InjectedError("injected into an allocation")
            extend(lease, num_tokens)

        stepper = engine._scheduler._stepper
        refill = stepper._refill

        def trap_refill() -> None:
            if self._num_step_faults:
                self._num_step_faults -= 1
                raise InjectedError("injected into a step")
            refill()

        engine.pool.extend = trap_extend  # type: ignore[method-assign]
        stepper._refill = trap_refill  # type: ignore[method-assign]
        return engine

    def serve_commands(self) -> None:
        """Answer commands until standard input ends, then end the process."""
        commands: dict[str, Callable[..., dict[str, Any]]] = {
            "audit": self._audit,
            "fail_steps": self._fail_steps,
            "leak": self._leak,
        }
        for line in sys.stdin:
            command = json.loads(line)
            try:
                reply = commands[command.pop("do")](**command)
            except Exception as error:
                logging.exception("a command failed")
                reply = {"error": f"{type(error).__name__}: {error}"}
            say(reply)
        os._exit(2)

    def _audit(self) -> dict[str, Any]:
        """Check the pool's books, and count what could pile up."""
        assert self.engine is not None
        assert self.loop is not None
        self.engine._scheduler.call(self.engine.pool.check).result(30)
        gc.collect()
        num_tasks = len(asyncio.all_tasks(self.loop))
        return {"objects": len(gc.get_objects()), "coroutines": num_tasks, **self.engine.get_stats()}

    def _fail_steps(self, count: int | None) -> dict[str, Any]:
        """Let the next steps fail, and return when they have; None is all, and returns at once."""
        self._num_step_faults = (1 << 62) if count is None else count
        while count is not None and self._num_step_faults:
            time.sleep(0.001)
        return {}

    def _leak(self) -> dict[str, Any]:
        """Lose two pages: for the proof that the harness notices."""
        assert self.engine is not None
        pool = self.engine.pool

        def take() -> None:
            lease = pool.open([1] * 8)
            assert lease is not None
            pool.extend(lease, 8)

        self.engine._scheduler.call(take).result(30)
        return {}


def say(message: dict[str, Any]) -> None:
    """One line to the harness."""
    print(json.dumps(message), flush=True)  # noqa: T201 - the channel to the harness


def main() -> int:
    """Serve until told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)9d %(levelname)s %(message)s")
    torch.set_num_threads(1)
    control = Control()
    urls: list[str] = []

    def note_listening(listening: list[str]) -> None:
        control.loop = asyncio.get_running_loop()
        urls.extend(listening)

    def note_ready(engine: InferenceEngine) -> None:
        control.engine = engine
        threading.Thread(target=control.serve_commands, daemon=True).start()
        say({"port": int(urls[0].rpartition(":")[2])})

    return run_server(SETTINGS, control.load, on_listening=note_listening, on_ready=note_ready)


if __name__ == "__main__":
    raise SystemExit(main())
