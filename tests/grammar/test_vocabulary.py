from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from astrai_triton.errors import GrammarError
from astrai_triton.grammar import Grammar
from astrai_triton.grammar.compiler import GrammarCompiler
from fakes import ByteTokenizer


class Tokens:
    """Single bytes, then whatever a test adds."""

    def __init__(
        self,
        *added: bytes,
        special: Mapping[str, int] | None = None,
        stops: frozenset[int] = frozenset({256}),
    ) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"", *added]
        self.vocab_size = len(self.tokens)
        self.special_tokens = {"<|end|>": 256} if special is None else special
        self.stop_ids = stops

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def legal(tokens: Tokens, grammar: Grammar, text: str, *, vocab_size: int | None = None) -> set[int]:
    size = vocab_size or tokens.vocab_size
    matcher = GrammarCompiler(tokens, size).compile(grammar).start()
    for byte in text.encode():
        matcher.accept(byte)
    mask = np.full((size + 31) // 32, -1, np.int32)
    matcher.fill_mask(mask)
    found: set[int] = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
    return found


ANY_STRING = Grammar.json_schema({"type": "string"})


def test_tokens_of_the_same_bytes_are_legal_together() -> None:
    assert legal(Tokens(b"ab", b"ab", b"a"), Grammar.regex("ab+"), "") == {ord("a"), 257, 258, 259}


def test_special_tokens_and_stop_ids_match_no_text() -> None:
    tokens = Tokens(b"x", b"y", b"z", special={"<|end|>": 256, "x": 257}, stops=frozenset({256, 258}))
    inside = legal(tokens, ANY_STRING, '"')
    assert 259 in inside
    assert not inside & {256, 257, 258}


def test_a_spelt_out_special_token_is_text() -> None:
    assert legal(Tokens(), ANY_STRING, '"<|end|>') == legal(Tokens(), ANY_STRING, '"')


def test_every_stop_id_ends_an_answer() -> None:
    tokens = Tokens(b"x", stops=frozenset({256, 257}))
    assert legal(tokens, ANY_STRING, '""') == {256, 257}
    assert legal(tokens, Grammar.regex("a*"), "a") == {ord("a"), 256, 257}


def test_ids_that_are_no_tokens_are_never_legal() -> None:
    anything = Grammar.regex("(.|\n)*")
    assert max(legal(Tokens(b"x", b"", b""), anything, "", vocab_size=300)) == 257
    assert max(legal(Tokens(b"x"), anything, "", vocab_size=258 + 64)) == 257


def test_half_a_character_is_followed_by_its_other_half() -> None:
    tokens = Tokens("é".encode()[:1], "é".encode()[1:])
    matcher = GrammarCompiler(tokens, tokens.vocab_size).compile(ANY_STRING).start()
    mask = np.zeros((tokens.vocab_size + 31) // 32, np.int32)
    matcher.accept(ord('"'))
    matcher.accept(257)
    matcher.fill_mask(mask)
    found = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
    assert found == {*range(0x80, 0xC0), 258}


def test_a_tokenizer_that_cannot_write_json_is_refused() -> None:
    with pytest.raises(GrammarError, match="ends an answer"):
        GrammarCompiler(Tokens(stops=frozenset()), 257)
    tokens = Tokens()
    tokens.tokens[ord("{")] = b""
    with pytest.raises(GrammarError, match=r"none for '\{'"):
        GrammarCompiler(tokens, 257)
    with pytest.raises(ValueError, match="wanted at least the tokenizer's 260"):
        GrammarCompiler(ByteTokenizer(), 259)


def test_a_character_that_tokens_cannot_write_is_refused() -> None:
    tokens = Tokens()
    tokens.tokens[0xC3] = b""
    compiler = GrammarCompiler(tokens, tokens.vocab_size)
    with pytest.raises(GrammarError, match="'é', which this model's tokens cannot write"):
        compiler.compile(Grammar.json_schema({"enum": ["a", "é"]}))
    compiler.compile(Grammar.json_schema({"enum": ["a", "日"]}))


@pytest.mark.real_model
def test_the_default_model_has_a_grammar() -> None:
    from astrai_triton.checkpoint import open_checkpoint, resolve

    tokenizer = open_checkpoint(resolve("SmolLM2-135M-Instruct")).tokenizer
    matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(Grammar.json_object()).start()
    for token_id in tokenizer.encode('{"name": "Zoë", "list": [1, {"a": null}]}', add_bos=False):
        assert not matcher.is_complete
        matcher.accept(token_id)
    assert matcher.is_complete
    mask = np.zeros((tokenizer.vocab_size + 31) // 32, np.int32)
    matcher.fill_mask(mask)
    ends = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert set(ends.tolist()) == tokenizer.stop_ids
