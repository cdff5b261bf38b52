"""Which tokens may come next in one answer."""

from __future__ import annotations

import threading

import llguidance
import numpy as np
from numpy.typing import NDArray

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.explain import explain_failure

# Errors without a dump of grammar and state; room for wide objects and unions, whose rows are long; an
# automaton of at most some 50 MiB, which is rebuilt when full.
LIMITS = llguidance.LLParserLimits(
    verbose_errors=False, max_items_in_row=20_000, step_max_items=200_000, max_lexer_states=100_000
)


class CompiledGrammar:
    """A grammar that is ready to begin answers; any number of them, from any thread.

    The answers share the lexer's automaton, which grows with what they meet; that makes masks cheap. Where it
    is full or broken, answers under way go on alone and later ones share a new one.

    Args:
        engine_tokenizer: of ``build_engine_tokenizer``.
        lark: the grammar as the engine takes it.

    Raises:
        GrammarError: the engine refuses the grammar, or no text of it can be written in tokens.
    """

    def __init__(self, engine_tokenizer: llguidance.LLTokenizer, lark: str) -> None:
        self.vocab_size = engine_tokenizer.vocab_size
        self._engine_tokenizer = engine_tokenizer
        self._lark = lark
        ends = np.zeros((self.vocab_size + 31) // 32 * 32, np.uint8)
        ends[engine_tokenizer.eos_tokens] = 1
        self.end_mask = np.packbits(ends, bitorder="little").tobytes()
        """The mask of a complete answer."""
        self._lock = threading.Lock()
        self._prototype: llguidance.LLMatcher | None = self._build()
        self._check_first_mask()

    def start(self) -> GrammarMatcher:
        """A matcher at the begin of an answer."""
        return GrammarMatcher(self)

    def fork(self) -> tuple[llguidance.LLMatcher, llguidance.LLMatcher]:
        """A prototype and a copy of it, which shares its automaton."""
        with self._lock:
            if self._prototype is None:
                self._prototype = self._build()
            return self._prototype, self._prototype.deep_copy()

    def replace(self, failed: llguidance.LLMatcher) -> llguidance.LLMatcher:
        """A matcher of its own, which shares nothing that one answer could break for others.

        Args:
            failed: the prototype whose automaton is full or broken; no further answer begins with it.
        """
        with self._lock:
            if failed is self._prototype:
                self._prototype = None
        return self._build()

    def _build(self) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._engine_tokenizer, self._lark, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(explain_failure(matcher.get_error()))
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise GrammarError(explain_failure(warnings[0]))
        return matcher

    def _check_first_mask(self) -> None:
        _, matcher = self.fork()
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(explain_failure(matcher.get_error()))


class GrammarMatcher:
    """The state of one answer. For one thread at a time.

    Args:
        compiled: what the answer has to obey.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._num_words = (compiled.vocab_size + 31) // 32
        self._accepted: list[int] = []
        self._prototype, self._engine = compiled.fork()

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Mark the tokens that may come next.

        Stop ids are among them where the answer may end. At least one token is; after the last one only stop
        ids are. The GIL is released while the engine works.

        Args:
            mask: ``[ceil(vocab_size / 32)]``, contiguous, written in place: bit ``i % 32`` of word
                ``i // 32`` says that token ``i`` may come.

        Raises:
            ValueError: ``mask`` has another shape, type or layout.
            GrammarError: the grammar is too complex here, or no token can continue the answer.
        """
        if mask.dtype != np.int32 or mask.shape != (self._num_words,):
            raise ValueError(
                f"mask: wanted int32 of shape ({self._num_words},), got {mask.dtype} of shape {mask.shape}"
            )
        if not (mask.flags.c_contiguous and mask.flags.writeable):
            raise ValueError("mask: wanted a contiguous, writable array; pass a row of a fresh one")
        self._engine.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._engine.is_error():
            self._restart()
            self._engine.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._engine.is_error():
                raise self._explain()

    def accept(self, token_id: int) -> None:
        """Append a token to the answer.

        Args:
            token_id: one of those that ``fill_mask`` would mark now.

        Raises:
            GrammarError: the token is not legal here; the answer stays as it was.
        """
        if not 0 <= token_id < self._compiled.vocab_size:
            raise GrammarError(f"token {token_id} is outside the vocabulary of {self._compiled.vocab_size}")
        if not self._engine.consume_token(token_id):
            self._consume_again(token_id)
        self._accepted.append(token_id)

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self._engine.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether only an end token may follow."""
        # The engine notices late that a number or a pattern cannot go on. Where an answer may end it takes a
        # mask to tell, which the engine keeps for the next step.
        is_over = self._engine.is_stopped() or (
            self._engine.is_accepting() and self._engine.compute_bitmask() == self._compiled.end_mask
        )
        # A failed engine is stopped as well, and marks only what ends an answer.
        return is_over and not self._engine.is_error()

    def _consume_again(self, token_id: int) -> None:
        """Tell an illegal token, after which the engine is of no more use, from an engine that failed."""
        for start_again in (self._prototype.deep_copy, self._replace):
            self._engine = start_again()
            if not self._engine.consume_tokens(self._accepted):
                continue
            # A mask tells a failed automaton, for which no token is legal, from one that is fine.
            mask = self._engine.compute_bitmask()
            if self._engine.is_error():
                continue
            if not mask[token_id // 8] >> token_id % 8 & 1:
                raise GrammarError(f"token {token_id} is not legal after {len(self._accepted)} tokens")
            if self._engine.consume_token(token_id):
                return
        raise self._explain()

    def _restart(self) -> None:
        self._engine = self._replace()
        if not self._engine.consume_tokens(self._accepted):
            raise self._explain()

    def _replace(self) -> llguidance.LLMatcher:
        # A failed engine stays failed, and so does every copy that shares its automaton. A fresh one that has
        # read the same tokens knows only what it needs of the automaton, and so has room again.
        return self._compiled.replace(failed=self._prototype)

    def _explain(self) -> GrammarError:
        return GrammarError(
            f"the grammar cannot be followed beyond {len(self._accepted)} tokens: "
            f"{explain_failure(self._engine.get_error())}"
        )
