"""A model without weights and a tokenizer of bytes: what is left of a step is the engine's own work."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from astrai_triton.kvcache import KVCache
from astrai_triton.model.config import LayerConfig, ModelConfig, RopeConfig

VOCAB = 512
MAX_SEQ_LEN = 8192

_NUM_LETTERS = 128


class TableModel:
    """Next token = table[last token]: one gather, whatever the batch. Reads and writes no K and V.

    Args:
        after: called with the number of tokens after each forward; a bench of HTTP waits there.
    """

    def __init__(self, after: Callable[[int], None] | None = None) -> None:
        self.config = ModelConfig(
            arch="llama",
            vocab_size=VOCAB,
            hidden_size=8,
            intermediate_size=8,
            n_q_heads=1,
            n_kv_heads=1,
            head_dim=8,
            max_seq_len=MAX_SEQ_LEN,
            layers=(LayerConfig(rope=RopeConfig(rotary_dim=8)),),
        )
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.cpu_s = 0.0
        """CPU time of all forwards."""
        self.num_tokens = 0
        """Tokens of all forwards."""
        self._after = after
        self._table = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
        # Nobody ends a turn, and every token is a character of its own.
        self._table[:, _NUM_LETTERS:] -= 2.0

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, logits_rows: torch.Tensor
    ) -> torch.Tensor:
        started = time.thread_time()
        logits = self._table[token_ids[logits_rows]]
        self.cpu_s += time.thread_time() - started
        self.num_tokens += len(token_ids)
        if self._after is not None:
            self._after(len(token_ids))
        return logits


class _ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """A token is a byte; the last id of the vocabulary ends a turn."""

    vocab_size = VOCAB
    stop_ids = frozenset({VOCAB - 1})
    renders_tools = False
    tool_format = None

    def encode(self, text: str, *, add_bos: bool | None = None, allow_special: bool = False) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **_: Any
    ) -> list[int]:
        return self.encode("\n".join(f"{message['role']}: {message['content']}" for message in messages))

    def detokenizer(self) -> _ByteDetokenizer:
        return _ByteDetokenizer()
