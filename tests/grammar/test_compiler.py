from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from astrai_triton.errors import GrammarError
from astrai_triton.grammar import Grammar, embed_schema
from astrai_triton.grammar.compiler import GrammarCompiler
from fakes import VOCAB, ByteTokenizer


def number(index: int) -> Grammar:
    return Grammar.json_schema({"const": index})


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    assert compiler.compile(Grammar.json_object()) is compiler.compile(Grammar.json_object())


def test_the_least_recently_used_grammar_goes_first() -> None:
    compiler = GrammarCompiler(ByteTokenizer(), VOCAB, cache_size=2)
    first, second = compiler.compile(number(1)), compiler.compile(number(2))
    assert compiler.compile(number(1)) is first
    compiler.compile(number(3))
    assert compiler.compile(number(1)) is first
    assert compiler.compile(number(2)) is not second


def test_a_cache_holds_at_least_one_grammar() -> None:
    with pytest.raises(ValueError, match="cache_size: wanted >= 1"):
        GrammarCompiler(ByteTokenizer(), VOCAB, cache_size=0)


def test_threads_share_grammars_and_walk_their_own_answers(compiler: GrammarCompiler) -> None:
    grammar = Grammar.json_schema({"type": "array", "items": {"type": "integer"}})
    text = json.dumps(list(range(200)))
    barrier = threading.Barrier(8)

    def walk() -> object:
        barrier.wait()
        compiled = compiler.compile(grammar)
        answer = compiled.start()
        mask = np.zeros((VOCAB + 31) // 32, np.int32)
        for byte in text.encode():
            answer.fill_mask(mask)
            assert mask[byte // 32] >> byte % 32 & 1
            answer.accept(byte)
        assert answer.is_complete
        return compiled

    with ThreadPoolExecutor(8) as pool:
        compiled = {future.result() for future in [pool.submit(walk) for _ in range(8)]}
    assert len(compiled) == 1


def test_a_refused_grammar_does_not_block_the_next(compiler: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match="unknown type"):
            compiler.compile(Grammar.json_schema({"type": "x"}))
    compiler.compile(number(4))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{", "not JSON"),
        ('{"minimum": NaN}', "NaN is not a JSON number"),
        ('{"const": 1e999}', "more digits than are kept"),
        ('{"items": ' * 2000 + "1" + "}" * 2000, "nests too deeply|32 schemas"),
        ('"text"', "an object or a boolean"),
        ('{"const": "\ud800"}', "lone surrogate at 11"),
        (json.dumps({"enum": ["x" * 300_000]}), "at most 262144 are taken"),
    ],
)
def test_a_schema_that_is_no_json_is_refused(compiler: GrammarCompiler, source: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        compiler.compile(Grammar("json_schema", source))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.lark("start: missing"), "missing"),
        (Grammar.lark('start: "a" b\nb: /(/'), "line 2"),
        (Grammar.lark(""), "start"),
        (Grammar.regex("("), "regex parse error|unclosed group"),
        (Grammar.regex("a(?=b)"), "look-around"),
    ],
)
def test_a_broken_grammar_is_refused_in_one_line(
    compiler: GrammarCompiler, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        compiler.compile(grammar)
    assert "\n" not in str(caught.value)
    assert "llguidance" not in str(caught.value)


def test_a_regex_covers_the_whole_answer(accepts: object, compiler: GrammarCompiler) -> None:
    assert callable(accepts)
    grammar = Grammar.regex("/[a-z]+/\\d{2}")
    assert accepts(grammar, "/path/42")
    for text in ("/path/4", "x/path/42", "/path/423", "/PATH/42"):
        assert not accepts(grammar, text)


def build_tool_lark(arguments: str) -> str:
    head = '"<tool_call>\\n{\\"name\\": \\"f\\", \\"arguments\\": "'
    return f'start: {head} %json {arguments} "}}\\n</tool_call>"'


def test_a_schema_in_a_lark_grammar_is_as_strict_as_alone(accepts: object) -> None:
    assert callable(accepts)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    grammar = Grammar.lark(build_tool_lark(embed_schema(schema)))
    frame = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    for arguments in ('{"x": 1}', '{"x":1}', '{\n  "x": 1\n}'):
        assert accepts(grammar, frame % arguments), arguments
    for arguments in ('{"x":  1}', '{"x": 1} ', ' {"x": 1}', "{}", '{"x":1,"\\u0078":"s"}'):
        assert not accepts(grammar, frame % arguments), arguments


def test_a_schema_in_a_lark_grammar_loses_its_dead_ends(accepts: object, compiler: GrammarCompiler) -> None:
    assert callable(accepts)
    dead = {"type": "string", "pattern": "^\\x01$"}
    schema = {"type": "object", "properties": {"a": dead}, "additionalProperties": False}
    grammar = Grammar.lark(f"start: %json {embed_schema(schema)} | %json {embed_schema({'type': 'null'})}")
    assert accepts(grammar, "{}")
    assert accepts(grammar, "null")
    with pytest.raises(GrammarError, match="not legal"):
        compiler.compile(grammar).start().accept(ord("["))
    answer = compiler.compile(grammar).start()
    answer.accept(ord("{"))
    with pytest.raises(GrammarError, match="not legal"):
        answer.accept(ord('"'))
    with pytest.raises(GrammarError, match="no JSON satisfies"):
        compiler.compile(Grammar.lark(build_tool_lark(embed_schema(dead))))
