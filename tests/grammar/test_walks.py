"""Random schemas, random and adversarial answers: no dead end, and what comes out is valid."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astrai_triton.errors import GrammarError
from astrai_triton.grammar import Grammar
from astrai_triton.grammar.compiler import CompiledGrammar, GrammarCompiler
from fakes import EOS, VOCAB, ByteTokenizer

Choose = Callable[[Mapping[int, bytes]], int]

NAMES = ("a", "b", 'd"x', "é")
VALUES = (None, True, 0, -1, 2.5, "a", "b\n", 'q"', "日本", [], [1, {"x": None}], {"k": "v"})
PATTERNS = ("^[a-c]+$", "x", r"^\d{2,4}$", "^(foo|bar)", "[^a]$", r"^\S+$", "^[A-Z][a-z]*( [A-Z][a-z]*)*$")
FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "uri", "duration")
CLOSING = (b'"', b"}", b"]")
FREE = 48
"""Tokens of an answer that are chosen freely; then it is steered to an end."""


def keywords(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=options)


def with_type(kind: str, **options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return keywords(**options).map(lambda found: {"type": kind, **found})


BOUNDS = {
    "minimum": st.sampled_from([0, -5, 3, 0.5, -1.25, 100]),
    "maximum": st.sampled_from([10, 7, 2.5, 1000, -1]),
    "exclusiveMinimum": st.sampled_from([0, 1, -3]),
    "exclusiveMaximum": st.sampled_from([20, 5, 4.5]),
    "multipleOf": st.sampled_from([1, 2, 3, 0.5, 7]),
}
LEAVES = st.one_of(
    st.sampled_from([True, {}, {"type": "null"}, {"type": "boolean"}, {"description": "x"}]),
    st.sampled_from(["A", "B"]).map(lambda name: {"$ref": f"#/$defs/{name}"}),
    with_type("integer", **BOUNDS),
    with_type("number", **BOUNDS),
    with_type(
        "string",
        minLength=st.integers(0, 4),
        maxLength=st.integers(0, 8),
        pattern=st.sampled_from(PATTERNS),
        format=st.sampled_from(FORMATS),
    ),
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=4).map(lambda values: {"enum": values}),
    st.sampled_from(VALUES).map(lambda value: {"const": value}),
)


def extend(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from(NAMES), parts, max_size=4)
    lists = st.lists(parts, min_size=1, max_size=3)
    return st.one_of(
        keywords(
            type=st.sampled_from(["object", ["object", "null"]]),
            properties=properties,
            required=st.lists(st.sampled_from((*NAMES, "zz")), unique=True, max_size=3),
            additionalProperties=st.one_of(st.just(False), parts),
            patternProperties=parts.map(lambda part: {"^p_": part}),
            minProperties=st.integers(0, 1),
        ),
        with_type(
            "array", items=parts, prefixItems=lists, minItems=st.integers(0, 3), maxItems=st.integers(0, 4)
        ),
        lists.map(lambda branches: {"anyOf": branches}),
        lists.map(lambda branches: {"oneOf": branches}),
        st.lists(parts, min_size=2, max_size=2).map(lambda branches: {"allOf": branches}),
    )


SCHEMAS = st.recursive(LEAVES, extend, max_leaves=12)
DOCUMENTS = st.builds(
    lambda root, a, b: {**(root if isinstance(root, dict) else {}), "$defs": {"A": a, "B": b}},
    SCHEMAS,
    SCHEMAS,
    SCHEMAS,
)


class WordTokenizer(ByteTokenizer):
    """Bytes, and tokens that cross the borders of JSON's own tokens and of characters."""

    words = (
        *(
            b'{"',
            b'": ',
            b'":',
            b'", "',
            b'"}',
            b"}}",
            b"}]",
            b"]}",
            b"[[",
            b"{}",
            b"[]",
            b"null",
            b"true",
            b", ",
        ),
        *(
            b"\n  ",
            b"\n    ",
            b"  ",
            b"12",
            b"0.",
            b"-1",
            b"e+",
            b"abc",
            b"foo",
            b'a"',
            b'b": 1',
            b"\\n",
            b'\\"',
        ),
        *(b"2024-", b"@a.b", b"\xa9x", "日".encode()[:2], b'"' + "日本".encode()[:4]),
    )
    vocab_size = VOCAB + len(words)

    def token_bytes(self, token_id: int) -> bytes:
        return super().token_bytes(token_id) if token_id < VOCAB else self.words[token_id - VOCAB]


TOKENIZERS = (ByteTokenizer(), WordTokenizer())


@pytest.fixture(scope="module", params=TOKENIZERS, ids=["bytes", "words"])
def walker(request: pytest.FixtureRequest) -> Walker:
    return Walker(request.param)


class Walker:
    """Answers under grammars, token by token."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
        self.spell = tokenizer.token_bytes
        self.mask = np.zeros((tokenizer.vocab_size + 31) // 32, np.int32)

    def walk(self, compiled: CompiledGrammar, choose: Choose, *, stops_early: bool) -> bytes | None:
        """Tokens by choice, then whatever closes; None if no end is near."""
        answer = compiled.start()
        text = b""
        for step in range(FREE + 400):
            if answer.is_complete:
                return text
            answer.fill_mask(self.mask)
            found = np.flatnonzero(np.unpackbits(self.mask.view(np.uint8), bitorder="little")).tolist()
            assert (EOS in found) == answer.is_accepting
            tokens = {token_id: self.spell(token_id) for token_id in found if token_id != EOS}
            assert tokens, "only an end may follow, but the answer is not complete"
            assert all(tokens.values()), "a token without bytes"
            if answer.is_accepting and (stops_early or step >= FREE):
                return text
            closing = [token_id for token_id in tokens if tokens[token_id] in CLOSING] if step >= FREE else []
            token_id = closing[0] if closing else choose(tokens)
            answer.accept(token_id)
            text += tokens[token_id]
        return None


def prefer_blanks(tokens: Mapping[int, bytes]) -> int:
    return max(tokens, key=lambda token_id: (tokens[token_id].isspace(), len(tokens[token_id]), -token_id))


def prefer_long(tokens: Mapping[int, bytes]) -> int:
    return max(tokens, key=lambda token_id: (len(tokens[token_id]), -token_id))


ADVERSARIES: tuple[Choose, ...] = (prefer_blanks, prefer_long, min, max)


def parse_number(text: str) -> Fraction | float:
    """The number itself; only one with a huge exponent is rounded."""
    return Fraction(text) if len(text.lower().partition("e")[2]) <= 4 else float(text)


# Large schemas are rare and worth their time.
@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(schema=DOCUMENTS, data=st.data())
def test_every_answer_comes_to_a_valid_end(
    walker: Walker, schema: dict[str, Any], data: st.DataObject
) -> None:
    try:
        compiled = walker.compiler.compile(Grammar.json_schema(schema))
    except GrammarError:
        return
    # Values are compared as they are written, as the specification says; a double would round them first.
    validator = jsonschema.Draft202012Validator(json.loads(json.dumps(schema), parse_float=parse_number))
    chance = data.draw(st.randoms(use_true_random=False))

    def uniform(tokens: Mapping[int, bytes]) -> int:
        return chance.choice(list(tokens))

    for choose, stops_early in ((uniform, True), (uniform, False), *((bad, False) for bad in ADVERSARIES)):
        text = walker.walk(compiled, choose, stops_early=stops_early)
        if text is not None:
            errors = list(validator.iter_errors(json.loads(text, parse_float=parse_number)))
            assert not errors, (text, errors[0].message)


@pytest.mark.parametrize("choose", ADVERSARIES)
def test_any_object_never_runs_into_a_dead_end(walker: Walker, choose: Choose) -> None:
    compiled = walker.compiler.compile(Grammar.json_object())
    text = walker.walk(compiled, choose, stops_early=False)
    assert text is None or isinstance(json.loads(text), dict)
