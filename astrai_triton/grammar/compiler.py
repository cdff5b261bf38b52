"""From a grammar to matchers, with a cache in between."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

from llguidance import regex_to_lark

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.limits import MAX_CHARS
from astrai_triton.grammar.liveness import settle_schema
from astrai_triton.grammar.matcher import CompiledGrammar, GrammarMatcher
from astrai_triton.grammar.probe import LeafProbe
from astrai_triton.grammar.schema import normalize_schema
from astrai_triton.grammar.spec import EMBED_MARK, Grammar, embed_settled
from astrai_triton.grammar.vocabulary import GrammarTokenizer, build_engine_tokenizer, single_bytes

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarMatcher"]

# Where one text only is possible the engine would otherwise allow its canonical tokens alone, which needs the
# tokenizer in every mask. The declaration stands last, so that line numbers in errors are the grammar's.
_TRAILER = '\n%llguidance {"no_forcing": true}\n'


class GrammarCompiler:
    """Checks grammars and prepares them for one vocabulary. For any thread.

    Building one takes about 0.2 s for 50 000 tokens.

    Args:
        tokenizer: of the model; its ``stop_ids`` end an answer, its special tokens match no text.
        vocab_size: tokens that the model has logits for; those beyond the tokenizer's are never legal.
        cache_size: grammars that are kept, least recently used ones go first.

    Raises:
        ValueError: ``vocab_size`` is below the tokenizer's, or ``cache_size`` below 1.
        GrammarError: no grammar can work with this tokenizer.
    """

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int, *, cache_size: int = 32) -> None:
        if cache_size < 1:
            raise ValueError(f"cache_size: wanted >= 1, got {cache_size}")
        self._engine_tokenizer = build_engine_tokenizer(tokenizer, vocab_size)
        self._bytes = frozenset(single_bytes(tokenizer))
        self._cache_size = cache_size
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._pending: set[Grammar] = set()
        self._changed = threading.Condition()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar, checked and ready to begin answers; one that is cached costs nothing.

        The GIL is released while the engine compiles. Threads that want the same grammar wait for the first.

        Args:
            grammar: what answers have to obey.

        Raises:
            GrammarError: malformed, unsupported, too large or without any legal text; says which and where.
        """
        with self._changed:
            self._changed.wait_for(lambda: grammar not in self._pending)
            compiled = self._cache.get(grammar)
            if compiled is not None:
                self._cache.move_to_end(grammar)
                return compiled
            self._pending.add(grammar)
        try:
            lark = self._write_lark(grammar)
            self._check_characters(lark)
            compiled = CompiledGrammar(self._engine_tokenizer, lark + _TRAILER)
        finally:
            with self._changed:
                if compiled is not None:
                    self._cache[grammar] = compiled
                    while len(self._cache) > self._cache_size:
                        self._cache.popitem(last=False)
                self._pending.discard(grammar)
                self._changed.notify_all()
        return compiled

    def _write_lark(self, grammar: Grammar) -> str:
        source = grammar.source
        if len(source) > MAX_CHARS:
            raise GrammarError(
                f"the {grammar.kind} has {len(source)} characters; at most {MAX_CHARS} are taken"
            )
        try:
            source.encode("utf-8")
        except UnicodeEncodeError as error:
            raise GrammarError(f"the {grammar.kind} has a lone surrogate at {error.start}") from error
        if grammar.kind == "json_schema":
            return f"start: %json {self._settle(normalize_schema(_parse_json(source)))}"
        if grammar.kind == "regex":
            # Two slashes begin a comment.
            return f"start: /{regex_to_lark(source)}/" if source else 'start: ""'
        return self._settle_embedded(source)

    def _check_characters(self, lark: str) -> None:
        missing = set(lark.encode("utf-8")) - self._bytes
        for char in lark if any(byte >= 0x80 for byte in missing) else "":
            if not char.isascii() and not missing.isdisjoint(char.encode("utf-8")):
                raise GrammarError(
                    f"the grammar has the character {char!r}, which this model's tokens cannot write"
                )

    def _settle(self, normal: dict[str, Any]) -> str:
        return embed_settled(settle_schema(normal, LeafProbe(self._engine_tokenizer)))

    def _settle_embedded(self, lark: str) -> str:
        decoder = json.JSONDecoder()
        settled: list[str] = []
        at = 0
        while (start := lark.find(EMBED_MARK, at)) >= 0:
            schema, end = decoder.raw_decode(lark, start)
            del schema["x-guidance"]
            settled += [lark[at:start], self._settle(schema)]
            at = end
        return "".join((*settled, lark[at:]))


def _parse_json(source: str) -> Any:
    try:
        return json.loads(source, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise GrammarError("the schema nests too deeply") from error
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
