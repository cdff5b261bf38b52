"""One vocabulary of bytes for all tests of grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from astrai_triton.errors import GrammarError
from astrai_triton.grammar import Grammar
from astrai_triton.grammar.compiler import GrammarCompiler, GrammarMatcher
from fakes import VOCAB, ByteTokenizer

Accepts = Callable[[Any, str], bool]


@pytest.fixture(scope="session")
def compiler() -> GrammarCompiler:
    """Grammars over single bytes; 256 ends an answer, 257 to 259 are nothing."""
    return GrammarCompiler(ByteTokenizer(), VOCAB)


@pytest.fixture(scope="session")
def accepts(compiler: GrammarCompiler) -> Accepts:
    """Whether an answer under a schema, or under a grammar, may be a text and end there."""

    def accepts_text(rule: Any, text: str) -> bool:
        grammar = rule if isinstance(rule, Grammar) else Grammar.json_schema(rule)
        matcher = compiler.compile(grammar).start()
        try:
            for byte in text.encode():
                matcher.accept(byte)
        except GrammarError:
            return False
        return matcher.is_accepting

    return accepts_text


@pytest.fixture(scope="session")
def legal() -> Callable[[GrammarMatcher], list[int]]:
    """Tokens that a matcher over single bytes marks."""

    def legal_tokens(matcher: GrammarMatcher) -> list[int]:
        mask = np.full((VOCAB + 31) // 32, -1, np.int32)
        matcher.fill_mask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        found: list[int] = np.flatnonzero(bits).tolist()
        return found

    return legal_tokens
