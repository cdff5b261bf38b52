from __future__ import annotations

from collections.abc import Callable

import llguidance
import numpy as np
import pytest

from astrai_triton.errors import GrammarError
from astrai_triton.grammar import Grammar, matcher
from astrai_triton.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarMatcher
from fakes import EOS, VOCAB, ByteTokenizer

Legal = Callable[[GrammarMatcher], list[int]]
NUM_WORDS = (VOCAB + 31) // 32


def feed(answer: GrammarMatcher, text: str) -> GrammarMatcher:
    for byte in text.encode():
        answer.accept(byte)
    return answer


def test_a_mask_is_written_in_place_and_whole(compiler: GrammarCompiler) -> None:
    masks = np.full((3, NUM_WORDS), -1, np.int32)
    compiler.compile(Grammar.regex("a|b")).start().fill_mask(masks[1])
    assert masks[1].tolist() == [0, 0, 0, 0b110, 0, 0, 0, 0, 0]
    assert (masks[[0, 2]] == -1).all()


@pytest.mark.parametrize(
    "mask",
    [
        np.zeros(NUM_WORDS, np.int64),
        np.zeros(NUM_WORDS + 1, np.int32),
        np.zeros((1, NUM_WORDS), np.int32),
        np.zeros(2 * NUM_WORDS, np.int32)[::2],
    ],
)
def test_another_mask_is_refused(compiler: GrammarCompiler, mask: np.ndarray) -> None:
    with pytest.raises(ValueError, match="mask: wanted"):
        compiler.compile(Grammar.json_object()).start().fill_mask(mask)


def test_a_mask_that_cannot_be_written_is_refused(compiler: GrammarCompiler) -> None:
    mask = np.zeros(NUM_WORDS, np.int32)
    mask.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        compiler.compile(Grammar.json_object()).start().fill_mask(mask)


def test_an_illegal_token_is_refused_and_changes_nothing(compiler: GrammarCompiler, legal: Legal) -> None:
    answer = feed(compiler.compile(Grammar.json_object()).start(), '{"a')
    before = legal(answer)
    for token_id in (ord("\n"), EOS, EOS + 1, -1, VOCAB):
        with pytest.raises(GrammarError):
            answer.accept(token_id)
    assert legal(answer) == before
    feed(answer, '": 1}')
    assert answer.is_complete


def test_an_answer_is_complete_as_soon_as_it_can_only_end(compiler: GrammarCompiler, legal: Legal) -> None:
    answer = compiler.compile(Grammar.json_object()).start()
    for byte in b'{"a": {}':
        answer.accept(byte)
        assert not answer.is_accepting
        assert not answer.is_complete
    answer.accept(ord("}"))
    assert answer.is_accepting
    assert answer.is_complete
    assert legal(answer) == [EOS]
    answer.accept(EOS)
    assert answer.is_complete
    with pytest.raises(GrammarError):
        answer.accept(ord(" "))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 10, "maximum": 99}, "42"),
        ({"type": "number", "multipleOf": 5, "minimum": 0, "maximum": 7}, "5"),
        ({"enum": [1, 22]}, "22"),
        ({"type": "boolean"}, "true"),
        ({"type": "string", "maxLength": 1}, '"x"'),
    ],
)
def test_a_scalar_that_cannot_go_on_is_complete(
    compiler: GrammarCompiler, legal: Legal, schema: dict[str, object], text: str
) -> None:
    answer = feed(compiler.compile(Grammar.json_schema(schema)).start(), text)
    assert answer.is_complete
    assert legal(answer) == [EOS]


def test_an_answer_may_go_on_where_it_may_end(compiler: GrammarCompiler, legal: Legal) -> None:
    answer = feed(compiler.compile(Grammar.json_schema({"type": "integer"})).start(), "1")
    assert answer.is_accepting
    assert not answer.is_complete
    assert legal(answer) == [*range(ord("0"), ord("9") + 1), EOS]


def test_an_empty_answer_is_complete_at_once(compiler: GrammarCompiler) -> None:
    assert compiler.compile(Grammar.regex("")).start().is_complete


def test_answers_of_one_grammar_are_independent(compiler: GrammarCompiler, legal: Legal) -> None:
    compiled = compiler.compile(Grammar.json_schema({"enum": ["ab", "cd"]}))
    first, second = compiled.start(), compiled.start()
    feed(first, '"a')
    feed(second, '"c')
    assert legal(first) == [ord("b")]
    assert legal(second) == [ord("d")]


def compile_within(monkeypatch: pytest.MonkeyPatch, grammar: Grammar, **limits: int) -> CompiledGrammar:
    """``grammar`` under limits of the engine that a test can reach."""
    monkeypatch.setattr(matcher, "LIMITS", llguidance.LLParserLimits(verbose_errors=False, **limits))
    return GrammarCompiler(ByteTokenizer(), VOCAB).compile(grammar)


def test_a_full_automaton_is_begun_anew(monkeypatch: pytest.MonkeyPatch, legal: Legal) -> None:
    grammar = Grammar.json_schema({"type": "string", "maxLength": 1000})
    compiled = compile_within(monkeypatch, grammar, max_lexer_states=1500)
    answer, other = compiled.start(), compiled.start()
    feed(answer, '"')
    for _ in range(1000):
        assert ord("x") in legal(answer)
        answer.accept(ord("x"))
    assert legal(answer) == [ord('"')]
    # It shares the automaton that was full first.
    feed(other, '"' + 500 * "x")
    assert ord("x") in legal(other)
    assert legal(compiled.start()) == [ord('"')]


def test_one_answer_too_many_for_the_engine_ends_alone(monkeypatch: pytest.MonkeyPatch, legal: Legal) -> None:
    grammar = Grammar.regex("(.*a.{9}|.*b.{9}|.*c.{9})x")
    compiled = compile_within(monkeypatch, grammar, step_lexer_fuel=500)
    answer, other = compiled.start(), compiled.start()
    feed(other, "d")

    def go_on() -> None:
        for byte in b"abaababb" * 40:
            legal(answer)
            answer.accept(byte)

    with pytest.raises(GrammarError, match="too complex"):
        go_on()
    assert not answer.is_complete
    for matcher_of_same in (other, compiled.start()):
        assert ord("d") in legal(matcher_of_same)
