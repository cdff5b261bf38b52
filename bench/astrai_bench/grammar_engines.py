"""Grammar engines side by side: what a server would call of each."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from astrai_triton.errors import GrammarError
from astrai_triton.grammar import Grammar
from astrai_triton.grammar.compiler import GrammarCompiler
from astrai_triton.grammar.vocabulary import GrammarTokenizer, build_engine_tokenizer


class RefusedError(Exception):
    """An engine does not take a schema; the text is its reason."""


class Walk(Protocol):
    """One answer under way."""

    def fill(self) -> None:
        """Compute the mask of the next token."""

    def accept(self, token_id: int) -> bool:
        """Append a token; False if it is not legal."""

    def may_end(self) -> bool:
        """Whether the answer may end here."""


Compile = Callable[[Any], Callable[[], Walk]]
"""Schema to a maker of walks; raises ``RefusedError``."""


def build_engines(tokenizer: GrammarTokenizer) -> dict[str, Callable[[], Compile]]:
    """Name of every engine that is installed, and what builds it for ``tokenizer``."""
    engines: dict[str, Callable[[], Compile]] = {
        "astrai": lambda: _build_astrai(tokenizer),
        "llguidance": lambda: _build_llguidance(tokenizer),
    }
    if importlib.util.find_spec("xgrammar") is not None:
        engines["xgrammar"] = lambda: _build_xgrammar(tokenizer)
    return engines


def _build_astrai(tokenizer: GrammarTokenizer) -> Compile:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, cache_size=1)

    def compile_schema(schema: Any) -> Callable[[], Walk]:
        try:
            compiled = compiler.compile(Grammar.json_schema(schema))
        except GrammarError as error:
            raise RefusedError(str(error)) from error
        return lambda: _AstraiWalk(compiled.start(), tokenizer.vocab_size)

    return compile_schema


class _AstraiWalk:
    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((vocab_size + 31) // 32, np.int32)

    def fill(self) -> None:
        self._matcher.fill_mask(self._mask)

    def accept(self, token_id: int) -> bool:
        try:
            self._matcher.accept(token_id)
        except GrammarError:
            return False
        return True

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting)


def _build_llguidance(tokenizer: GrammarTokenizer) -> Compile:
    from llguidance import LLMatcher

    engine_tokenizer = build_engine_tokenizer(tokenizer, tokenizer.vocab_size)

    def compile_schema(schema: Any) -> Callable[[], Walk]:
        lark = f'start: %json {json.dumps(schema)}\n%llguidance {{"no_forcing": true}}'
        matcher = LLMatcher(engine_tokenizer, lark, log_level=0)
        if matcher.is_error():
            raise RefusedError(matcher.get_error().split("\n")[0])
        return lambda: _LLGuidanceWalk(matcher.deep_copy(), tokenizer.vocab_size)

    return compile_schema


class _LLGuidanceWalk:
    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((vocab_size + 31) // 32, np.int32)

    def fill(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())


def _build_xgrammar(tokenizer: GrammarTokenizer) -> Compile:
    xgrammar: Any = importlib.import_module("xgrammar")
    special = set(tokenizer.special_tokens.values()) | tokenizer.stop_ids
    vocabulary = [
        b"" if token_id in special else tokenizer.token_bytes(token_id)
        for token_id in range(tokenizer.vocab_size)
    ]
    vocabulary_info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, stop_token_ids=sorted(tokenizer.stop_ids)
    )
    compiler = xgrammar.GrammarCompiler(vocabulary_info, max_threads=1, cache_enabled=False)

    def compile_schema(schema: Any) -> Callable[[], Walk]:
        try:
            # Strict mode would forbid every property that is not listed, whatever the schema says.
            compiled = compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        except (RuntimeError, ValueError) as error:
            raise RefusedError(str(error).strip().split("\n")[-1]) from error
        return lambda: _XGrammarWalk(xgrammar, compiled, tokenizer)

    return compile_schema


class _XGrammarWalk:
    def __init__(self, xgrammar: Any, compiled: Any, tokenizer: GrammarTokenizer) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
        self._stop_id = min(tokenizer.stop_ids)

    def fill(self) -> None:
        self._matcher.fill_next_token_bitmask(self._mask)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def may_end(self) -> bool:
        return self.accept(self._stop_id)
