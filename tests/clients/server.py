"""The server that the clients talk to: a scripted model behind the real engine, cache, sampler and HTTP.

Run as ``python -m clients.server``. Says its URL on standard output, one JSON object, and serves until
SIGTERM. Its API keys stand in ``ASTRAI_API_KEYS``.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from astrai_server import problem
from astrai_server.config import ServerSettings, Settings
from astrai_server.keys import load_keys
from astrai_server.run import run_server
from astrai_triton.engine import InferenceEngine, TaskHandle
from astrai_triton.errors import EngineUnavailableError, QueueFullError
from astrai_triton.kvcache import KVCache
from clients.script import rank_tokens, read_context
from fakes import EOS, VOCAB, ByteTokenizer, Context, ScriptedModel

MODEL_NAME = "scripted"
MAX_SEQ_LEN = 4096
PAUSE_S = 0.02
RETRY_AFTER_S = 1.0
"""Clients wait as long as they are told to; nobody learns more from a longer wait."""

_LIKING_STEP = 20.0
"""Logits between what the model likes and what it likes next: no temperature makes it say the second."""

SETTINGS = Settings(server=ServerSettings(port=0))


class AnsweringModel(ScriptedModel):
    """Says what ``script`` ranks first, or the first of it that a grammar allows."""

    def __init__(self) -> None:
        super().__init__(lambda _: EOS, on_forward=self._note, max_seq_len=MAX_SEQ_LEN)
        self._contexts: list[bytes] = []

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, logits_rows: torch.Tensor
    ) -> torch.Tensor:
        ends = kv_cache.qo_indptr[1:].long() - 1
        # Its logits are not wanted, its checks of the KV cache are.
        super().__call__(token_ids, positions, kv_cache, ends)
        logits = torch.zeros(len(logits_rows), VOCAB)
        for i, row in enumerate(logits_rows.tolist()):
            request = int((ends < row).sum())
            context = self._contexts[request]
            # A row before the last of its request is one of the prompt, whose probability is wanted.
            plan, said = read_context(context[: len(context) - (int(ends[request]) - row)])
            ranked = rank_tokens(plan, said)
            for rank, token_id in enumerate(ranked):
                logits[i, token_id] = _LIKING_STEP * (len(ranked) - rank)
            if plan.fault_after == len(said):
                logits[i, 0] = float("nan")
        return logits

    def _note(self, contexts: list[Context]) -> None:
        self._contexts = [_to_bytes(context) for context in contexts]
        answers = [read_context(context) for context in self._contexts]
        if any(plan.is_slow and said for plan, said in answers):
            time.sleep(PAUSE_S)


class RefusingEngine(InferenceEngine):
    """Turns a prompt that asks for it away twice: with a full queue, then as unavailable."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_refused: collections.Counter[bytes] = collections.Counter()

    def submit_many(self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any) -> list[TaskHandle]:
        """See ``InferenceEngine.submit_many``."""
        for prompt_ids in prompts:
            self._refuse(prompt_ids)
        return super().submit_many(prompts, *args, **options)

    def _refuse(self, prompt_ids: Sequence[int]) -> None:
        prompt = _to_bytes(prompt_ids)
        if not read_context(prompt)[0].refuses:
            return
        self._num_refused[prompt] += 1
        if self._num_refused[prompt] == 1:
            raise QueueFullError(1, RETRY_AFTER_S)
        if self._num_refused[prompt] == 2:
            raise EngineUnavailableError("refused on purpose")


def _to_bytes(token_ids: Sequence[int]) -> bytes:
    """One byte a token: every token but the end of a turn is one."""
    return bytes(token_id for token_id in token_ids if token_id < 256)


def load_engine() -> InferenceEngine:
    """The engine, ready to run."""
    return RefusingEngine(
        AnsweringModel(),
        ByteTokenizer(),
        max_batch_size=8,
        page_size=16,
        n_tokens=8 * MAX_SEQ_LEN,
        max_seq_len=MAX_SEQ_LEN,
        model_name=MODEL_NAME,
    )


def main() -> int:
    """Serve until told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)9d %(levelname)s %(message)s")
    torch.set_num_threads(1)
    problem.UNAVAILABLE_RETRY_S = RETRY_AFTER_S
    urls: list[str] = []

    def note_ready(engine: InferenceEngine) -> None:
        print(json.dumps({"url": urls[0]}), flush=True)  # noqa: T201 - the channel to the runner

    keys = load_keys(SETTINGS, os.environ)
    return run_server(SETTINGS, load_engine, keys=keys, on_listening=urls.extend, on_ready=note_ready)


if __name__ == "__main__":
    raise SystemExit(main())
