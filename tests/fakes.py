"""A model and a tokenizer without weights, for tests of everything around a model.

The scripted model keeps token ids in the KV cache and derives the next token from what it reads back there. A
slot that is shared wrongly, written twice or lost changes the text.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from astrai_triton.errors import ChatTemplateError
from astrai_triton.kvcache import KVCache
from astrai_triton.model.config import LayerConfig, ModelConfig, RopeConfig

EOS = 256
VOCAB = 260

Context = tuple[int, ...]


def hash_script(context: Context) -> int:
    """A printable ASCII token that depends on every token of the context and its place."""
    state = 7
    for position, token_id in enumerate(context):
        state = (state * 1_000_003 + token_id * 31 + position) & 0xFFFFFFFF
    return 97 + state % 26


def echo_script(text: str | bytes, prompt_len: int) -> Callable[[Context], int]:
    """Answer with ``text`` after a prompt of ``prompt_len`` tokens, then end the turn."""
    data = text.encode() if isinstance(text, str) else text

    def script(context: Context) -> int:
        done = len(context) - prompt_len
        return data[done] if done < len(data) else EOS

    return script


def answer_script(answers: Mapping[str, str | bytes]) -> Callable[[Context], int]:
    """Answer by what the prompt ends with, whatever stands before; unknown prompts end at once."""
    table = {
        key.encode(): value.encode() if isinstance(value, str) else value for key, value in answers.items()
    }

    def script(context: Context) -> int:
        data = bytes(token_id for token_id in context if token_id < 256)
        for key, answer in table.items():
            at = data.rfind(key)
            if at >= 0 and answer.startswith(data[at + len(key) :]):
                done = len(data) - at - len(key)
                return answer[done] if done < len(answer) else EOS
        return EOS

    return script


class ScriptedModel:
    """Next token = ``script(tokens read from the KV cache)``.

    Args:
        script: context -> next token id.
        on_forward: called with the contexts of each forward before it counts; may raise to inject a fault.
        spread: logits of the tokens that were not chosen vary by up to this, so that sampling has a choice.
    """

    def __init__(
        self,
        script: Callable[[Context], int] = hash_script,
        *,
        on_forward: Callable[[list[Context]], None] | None = None,
        spread: float = 0.0,
        max_seq_len: int = 4096,
    ) -> None:
        rope = RopeConfig(rotary_dim=8)
        self.config = ModelConfig(
            arch="llama",
            vocab_size=VOCAB,
            hidden_size=8,
            intermediate_size=8,
            n_q_heads=1,
            n_kv_heads=1,
            head_dim=8,
            max_seq_len=max_seq_len,
            layers=(LayerConfig(rope=rope),),
        )
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.script = script
        self.on_forward = on_forward
        self.spread = spread
        self.forwards: list[tuple[int, ...]] = []
        """q_lens of every forward that was run."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        logits_rows: torch.Tensor,
    ) -> torch.Tensor:
        assert token_ids.shape == positions.shape == (sum(kv_cache.q_lens),)
        slots = kv_cache.out_cache_loc.long()
        assert bool((slots >= 0).all())
        kv_cache.k_buffer[0, slots, 0, 0] = token_ids.float()
        kv_cache.v_buffer[0, slots, 0, 0] = positions.float()
        contexts = [self._read(kv_cache, b) for b in range(len(kv_cache.q_lens))]
        self.forwards.append(kv_cache.q_lens)
        if self.on_forward is not None:
            self.on_forward(contexts)
        starts = kv_cache.qo_indptr.tolist()
        logits = torch.empty(len(logits_rows), self.config.vocab_size)
        for i, row in enumerate(logits_rows.tolist()):
            b = bisect_right(starts, row) - 1
            # What the row has seen: nothing after itself.
            context = contexts[b][: kv_cache.kv_lens[b] - (starts[b + 1] - 1 - row)]
            logits[i] = self.logits_after(context)
        return logits

    def logits_after(self, context: Context) -> torch.Tensor:
        """``[vocab_size]`` float32 behind ``context``."""
        logits = torch.full((self.config.vocab_size,), -20.0 if self.spread else 0.0)
        if self.spread:
            generator = torch.Generator().manual_seed(hash(context) & 0xFFFFFFFF)
            logits[:128] = torch.rand(128, generator=generator) * self.spread
        logits[self.script(context)] += 8.0
        return logits

    def _read(self, kv_cache: KVCache, b: int) -> Context:
        kv_len = int(kv_cache.seq_lens[b])
        assert kv_len == kv_cache.kv_lens[b]
        slots = kv_cache.req_to_token.numpy()[int(kv_cache.req_pool_indices[b]), :kv_len]
        assert int(slots.min(initial=0)) >= 0, "a position that is read has no slot"
        positions = kv_cache.v_buffer.numpy()[0, slots, 0, 0]
        assert bool((positions == np.arange(kv_len)).all()), "K/V of another position"
        return tuple(kv_cache.k_buffer.numpy()[0, slots, 0, 0].astype(np.int64).tolist())


class DistinctModel(ScriptedModel):
    """A scripted model whose logits all differ, by up to ``spread``, 1 unless given."""

    def logits_after(self, context: Context) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(context) & 0xFFFFFFFF)
        logits = torch.rand(self.config.vocab_size, generator=generator) * (self.spread or 1.0)
        logits[self.script(context)] += 8.0
        return logits


class ByteDetokenizer:
    """Bytes to whole characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """One token per byte; 256 ends a turn. Its chat template is ``<role>content`` per message."""

    vocab_size = VOCAB
    bos_id = None
    add_bos = False
    stop_ids = frozenset({EOS})
    special_tokens: Mapping[str, int] = {"<|end|>": EOS}
    chat_template = "scripted"
    renders_tools = False
    tool_format = None

    def encode(self, text: str, *, add_bos: bool | None = None, allow_special: bool = False) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: object = None,
    ) -> list[int]:
        if messages and messages[0]["role"] == "assistant":
            raise ChatTemplateError("the conversation must not begin with the assistant")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return self.encode(text + ("<assistant>" if add_generation_prompt and not continue_final else ""))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()
