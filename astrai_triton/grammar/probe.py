"""Whether one string or number has a value, and whether the lexer can follow it."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import numpy as np

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.explain import explain_failure
from astrai_triton.grammar.spec import embed_settled

_NUM_STEPS = 2
_LIMITS = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=25_000)


class LeafProbe:
    """Answers for schemas of one string or number, each of which is tried once.

    A pattern that matches only characters which cannot be written, or a range without a multiple, is empty,
    and some regular expressions cost more than a step may. Neither shows before the engine stands in front
    of it, so a few tokens are tried here, always the same.

    Args:
        engine_tokenizer: of ``build_engine_tokenizer``.
    """

    def __init__(self, engine_tokenizer: llguidance.LLTokenizer) -> None:
        self._engine_tokenizer = engine_tokenizer
        self._answers: dict[str, bool] = {}

    def __call__(self, leaf: dict[str, Any]) -> bool:
        """Whether ``leaf``, a schema in normal form, has a value that tokens can write.

        Raises:
            GrammarError: the engine refuses it, or following it is too expensive.
        """
        text = embed_settled(leaf)
        if text not in self._answers:
            self._answers[text] = self._try(text, leaf)
        return self._answers[text]

    def _try(self, text: str, leaf: dict[str, Any]) -> bool:
        lark = f'start: %json {text}\n%llguidance {{"no_forcing": true}}'
        matcher = llguidance.LLMatcher(self._engine_tokenizer, lark, log_level=0, limits=_LIMITS)
        mask = np.zeros((self._engine_tokenizer.vocab_size + 31) // 32, np.int32)
        for step in range(_NUM_STEPS):
            if matcher.is_error():
                break
            if matcher.is_stopped():
                return True
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            legal = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            legal = np.setdiff1d(legal, self._engine_tokenizer.eos_tokens)
            if not matcher.is_error() and len(legal):
                matcher.consume_token(int(legal[len(legal) * (step + 1) // (_NUM_STEPS + 1)]))
        if not matcher.is_error():
            return True
        error = matcher.get_error()
        if "NoExtension" in error or "Unsatisfiable" in error:
            return False
        shown = json.dumps(leaf, ensure_ascii=False)
        raise GrammarError(
            f"{explain_failure(error)} (in {shown if len(shown) <= 200 else shown[:197] + '...'})"
        )
