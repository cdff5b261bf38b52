"""Our tokenizer as the grammar engine sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import llguidance

from astrai_triton.errors import GrammarError

_PRINTABLE = range(0x20, 0x7F)


class GrammarTokenizer(Protocol):
    """What a grammar has to know of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def special_tokens(self) -> Mapping[str, int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class _TokenTable:
    """The attributes that ``llguidance.LLTokenizer`` reads off a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: str | bytes) -> list[int]:
        # Asked for only to force the canonical tokens of a text, which our grammars switch off.
        raise NotImplementedError("tokens are not forced")


def build_engine_tokenizer(tokenizer: GrammarTokenizer, vocab_size: int) -> llguidance.LLTokenizer:
    """The grammar engine's tokenizer over the bytes that our tokens add to a text.

    Special tokens and stop ids match no text, whatever they spell. Ids without bytes, and those between
    ``tokenizer.vocab_size`` and ``vocab_size``, are never legal.

    Args:
        tokenizer: gives the bytes of every token.
        vocab_size: tokens that the model has logits for, at least ``tokenizer.vocab_size``.

    Raises:
        ValueError: ``vocab_size`` is too small.
        GrammarError: the tokenizer has no end token, or none for a printable ASCII character.
    """
    if vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"vocab_size: wanted at least the tokenizer's {tokenizer.vocab_size}, got {vocab_size}"
        )
    if not tokenizer.stop_ids:
        raise GrammarError("structured output needs a token that ends an answer, and this tokenizer has none")
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    missing = bytes(set(_PRINTABLE) - single_bytes(tokenizer))
    if missing:
        raise GrammarError(
            "structured output needs a token for every printable ASCII character; this tokenizer has none "
            f"for {missing.decode('ascii')!r}"
        )
    names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    special = sorted(names.keys() | tokenizer.stop_ids)
    for token_id in special:
        tokens[token_id] = names.get(token_id, f"<|{token_id}|>").encode("utf-8", "replace")
    tokens.extend([b""] * (vocab_size - len(tokens)))
    stop_ids = sorted(tokenizer.stop_ids)
    table = _TokenTable(tokens, special, stop_ids[0])
    # Read by attribute; the annotation names a class that wants a whole Hugging Face tokenizer.
    return llguidance.LLTokenizer(table, eos_token=stop_ids)  # type: ignore[arg-type]


def single_bytes(tokenizer: GrammarTokenizer) -> set[int]:
    """The bytes that are a token of their own, outside of special tokens and stop ids."""
    special = tokenizer.stop_ids | set(tokenizer.special_tokens.values())
    tokens = (tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size) if i not in special)
    return {token[0] for token in tokens if len(token) == 1}
