"""Grammars of answers with tools: whatever the grammar engine lets through is read back as valid calls."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import numpy as np
import pytest

from astrai_server.answer import CallArguments, CallStart, Text
from astrai_server.conversation import Tool, ToolChoice
from astrai_server.tools.grammar import MAX_CALLS, build_tool_grammar
from astrai_server.tools.parser import ToolCallParser, ToolFormat
from astrai_triton.errors import GrammarError
from astrai_triton.grammar import Grammar
from astrai_triton.grammar.compiler import GrammarCompiler
from astrai_triton.grammar.matcher import GrammarMatcher
from fakes import EOS, VOCAB, ByteTokenizer

FORMATS: tuple[ToolFormat, ...] = ("hermes", "json", "auto")
WEATHER = Tool(
    "get_weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    strict=True,
)
CLOCK = Tool("clock", None, {})
POINT = Tool(
    "point-1",
    None,
    {
        "properties": {"at": {"$ref": "#/$defs/pair"}},
        "required": ["at"],
        "$defs": {"pair": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
    },
)
TOOLS = (WEATHER, CLOCK, POINT)
# A back reference is beyond any grammar.
UNSUPPORTED = {"type": "object", "properties": {"x": {"type": "string", "pattern": r"(.)\1"}}}

WEATHER_CALL = '{"name": "get_weather", "arguments": {"city": "Rome", "unit": "C"}}'
TAGGED = f"<tool_call>\n{WEATHER_CALL}\n</tool_call>"
PLAIN = WEATHER_CALL.replace("arguments", "parameters")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer(), VOCAB)


def build(
    mode: Any,
    tool_format: ToolFormat,
    *,
    tools: tuple[Tool, ...] = TOOLS,
    name: str | None = None,
    **options: Any,
) -> Grammar:
    grammar = build_tool_grammar(tools, ToolChoice(mode, name, **options), tool_format)
    assert grammar is not None
    return grammar


def legal_tokens(matcher: GrammarMatcher) -> set[int]:
    mask = np.zeros((VOCAB + 31) // 32, np.int32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    return {int(token_id) for token_id in np.flatnonzero(bits)}


def follow(matcher: GrammarMatcher, text: str) -> bool:
    """Whether the matcher lets ``text`` through; it has read it then."""
    try:
        for byte in text.encode():
            matcher.accept(byte)
    except GrammarError:
        return False
    return True


def allows(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether ``text`` is a whole answer."""
    matcher = compiler.compile(grammar).start()
    return follow(matcher, text) and matcher.is_accepting


def walk(compiler: GrammarCompiler, grammar: Grammar, seed: int, begin: str = "") -> str:
    """A random answer, drawn byte by byte among the legal ones, with a bent to come to an end."""
    matcher, rng = compiler.compile(grammar).start(), random.Random(seed)
    assert follow(matcher, begin)
    written = bytearray(begin.encode())
    while not matcher.is_complete:
        legal = legal_tokens(matcher)
        closing = sorted(legal & {EOS, *b'"}]'})
        printable = sorted(token_id for token_id in legal if token_id in range(32, 127) or token_id == EOS)
        is_ending = rng.random() < 0.3 or len(written) > 1000
        token_id = rng.choice(closing if closing and is_ending else printable or sorted(legal))
        if token_id == EOS:
            break
        matcher.accept(token_id)
        written.append(token_id)
    assert matcher.is_accepting
    return written.decode()


def read(
    text: str, tool_format: ToolFormat, tools: tuple[Tool, ...] = TOOLS
) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    parser = ToolCallParser([tool.name for tool in tools], tool_format=tool_format, new_id=lambda: "id")
    words, calls = "", list[tuple[str, str]]()
    for piece in [*parser.push(text), *parser.flush()]:
        if isinstance(piece, Text):
            words += piece.text
        elif isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return words, [(name, json.loads(arguments)) for name, arguments in calls]


def check_arguments(name: str, arguments: Mapping[str, Any], tools: tuple[Tool, ...] = TOOLS) -> None:
    (tool,) = (tool for tool in tools if tool.name == name)
    jsonschema.validate(arguments, {"type": "object", **tool.parameters})


# No grammar


@pytest.mark.parametrize("tool_format", FORMATS)
def test_the_model_writes_freely_where_nothing_is_required(tool_format: ToolFormat) -> None:
    assert build_tool_grammar([CLOCK, POINT], ToolChoice("auto"), tool_format) is None
    assert build_tool_grammar(TOOLS, ToolChoice("none"), tool_format) is None
    assert build_tool_grammar([], ToolChoice("auto"), tool_format) is None


# Answers that have a form of their own


@pytest.mark.parametrize("tool_format", FORMATS)
def test_an_answer_with_a_form_is_calls_or_that(compiler: GrammarCompiler, tool_format: ToolFormat) -> None:
    answer = Grammar.json_schema({"type": "object", "properties": {"sum": {"type": "integer"}}})
    grammar = build_tool_grammar(TOOLS, ToolChoice("auto"), tool_format, answer=answer)
    assert grammar is not None
    call = PLAIN if tool_format == "json" else TAGGED
    assert allows(compiler, grammar, call)
    assert allows(compiler, grammar, '{"sum": 3}')
    assert not allows(compiler, grammar, "three")
    assert not allows(compiler, grammar, '{"sum": 3}' + call)
    for seed in range(6):
        words, calls = read(walk(compiler, grammar, seed), tool_format)
        assert bool(words) is not bool(calls)
        if words:
            jsonschema.validate(json.loads(words), json.loads(answer.source))


def test_the_form_of_an_answer_says_nothing_of_calls_that_must_be(compiler: GrammarCompiler) -> None:
    grammar = build_tool_grammar(TOOLS, ToolChoice("required"), "hermes", answer=Grammar.json_object())
    assert grammar is not None
    assert allows(compiler, grammar, TAGGED)
    assert not allows(compiler, grammar, "{}")


def test_without_tools_there_is_the_form_alone() -> None:
    answer = Grammar.json_object()
    assert build_tool_grammar([], ToolChoice("auto"), "hermes", answer=answer) is answer
    assert build_tool_grammar(TOOLS, ToolChoice("none"), "hermes", answer=answer) is answer


# Required calls


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_required_answer_is_valid_calls_and_nothing_else(
    compiler: GrammarCompiler, tool_format: ToolFormat, seed: int
) -> None:
    words, calls = read(walk(compiler, build("required", tool_format), seed), tool_format)
    assert words == ""
    assert 1 <= len(calls) <= MAX_CALLS
    for name, arguments in calls:
        check_arguments(name, arguments)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_named_tool_is_the_only_one_called(
    compiler: GrammarCompiler, tool_format: ToolFormat, tool: Tool
) -> None:
    grammar = build("named", tool_format, name=tool.name, is_parallel=False)
    for seed in range(3):
        words, calls = read(walk(compiler, grammar, seed), tool_format)
        assert words == ""
        ((name, arguments),) = calls
        assert name == tool.name
        check_arguments(name, arguments)


@pytest.mark.parametrize(
    ("tool_format", "call", "separator"), [("hermes", TAGGED, "\n"), ("json", PLAIN, "; ")]
)
def test_required_calls_are_bounded(
    compiler: GrammarCompiler, tool_format: ToolFormat, call: str, separator: str
) -> None:
    many = build("required", tool_format)
    assert allows(compiler, many, separator.join([call] * MAX_CALLS))
    assert not allows(compiler, many, separator.join([call] * (MAX_CALLS + 1)))
    one = build("required", tool_format, is_parallel=False)
    assert allows(compiler, one, call)
    assert not allows(compiler, one, separator.join([call] * 2))
    assert not allows(compiler, many, "")
    assert not allows(compiler, many, f"Well. {call}")
    matcher = compiler.compile(one).start()
    assert follow(matcher, call)
    assert matcher.is_complete


# Free text with calls


@pytest.mark.parametrize(
    "text", ["", "Sunny.", "  \n", "a < b", "<tool_cal", "1 {", "(.|\n)* \x1c é 日本", "It is <b>hot</b>.\n"]
)
@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_text_stays_free(
    compiler: GrammarCompiler, text: str, tool_format: ToolFormat, is_parallel: bool
) -> None:
    grammar = build("auto", tool_format, is_parallel=is_parallel)
    assert allows(compiler, grammar, text)
    assert read(text, tool_format) == (text, [])


@pytest.mark.parametrize("tool_format", ["hermes", "auto"])
def test_after_a_tag_comes_a_valid_call(compiler: GrammarCompiler, tool_format: ToolFormat) -> None:
    grammar = build("auto", tool_format)
    matcher = compiler.compile(grammar).start()
    assert follow(matcher, "Let me see. <tool_call>")
    assert legal_tokens(matcher) == {ord("\n")}
    assert follow(matcher, "\n")
    assert legal_tokens(matcher) == {ord("{")}
    assert allows(compiler, grammar, f"Let me see. {TAGGED} So {TAGGED}\n{TAGGED} and that is it <tool>")
    assert not allows(compiler, grammar, TAGGED.replace("Rome", "Rome, the capital"))
    assert not allows(compiler, grammar, TAGGED.replace("get_weather", "get"))
    assert not allows(compiler, grammar, f"{TAGGED} <tool_call> {TAGGED}")
    assert not allows(compiler, grammar, "<tool_call>")


@pytest.mark.parametrize("tool_format", ["hermes", "auto"])
def test_after_the_only_call_the_answer_is_complete(
    compiler: GrammarCompiler, tool_format: ToolFormat
) -> None:
    matcher = compiler.compile(build("auto", tool_format, is_parallel=False)).start()
    assert follow(matcher, f"Well. {TAGGED}")
    assert matcher.is_complete


@pytest.mark.parametrize("text", ["{", " \n{", "[", "\u00a0[1]", "\x1c{", "<|python_tag|>", " <|"])
def test_text_that_may_be_a_plain_call_is_one(compiler: GrammarCompiler, text: str) -> None:
    for tool_format in ("json", "auto"):
        grammar = build("auto", tool_format)
        assert not allows(compiler, grammar, f"{text}x")
    assert allows(compiler, build("auto", "hermes"), f"{text}x")


def test_a_plain_call_that_begins_is_valid(compiler: GrammarCompiler) -> None:
    grammar = build("auto", "json")
    assert allows(compiler, grammar, PLAIN)
    assert allows(compiler, grammar, f"{PLAIN}; {PLAIN}")
    assert not allows(compiler, grammar, PLAIN.replace('"C"', '"K"'))
    assert not allows(compiler, grammar, f"{PLAIN} and so on")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("tool_format", "begin"),
    [("hermes", "Hm <tool_call>"), ("auto", "<tool_call>"), ("json", "{"), ("auto", TAGGED), ("auto", "")],
)
def test_random_answers_have_valid_calls_only(
    compiler: GrammarCompiler, tool_format: ToolFormat, begin: str, seed: int
) -> None:
    text = walk(compiler, build("auto", tool_format), seed, begin)
    words, calls = read(text, tool_format)
    assert "<tool_call>" not in words
    assert len(calls) >= (begin != "")
    for name, arguments in calls:
        check_arguments(name, arguments)


# Schemas


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_a_strict_schema_that_cannot_be_enforced_is_refused_by_name(mode: Any) -> None:
    tool = Tool("odd", None, UNSUPPORTED, strict=True)
    with pytest.raises(GrammarError, match=r"odd.*pattern"):
        build(mode, "hermes", tools=(tool, CLOCK))


def test_any_other_schema_that_cannot_be_enforced_is_any_object(compiler: GrammarCompiler) -> None:
    grammar = build("required", "json", tools=(WEATHER, Tool("odd", None, UNSUPPORTED)))
    assert allows(compiler, grammar, '{"name": "odd", "parameters": {"x": [1], "y": {}}}')
    assert not allows(compiler, grammar, '{"name": "odd", "parameters": [1]}')
    assert not allows(compiler, grammar, PLAIN.replace('"C"', '"K"'))


def test_a_schema_that_only_the_compiler_refuses_is_any_object_too(compiler: GrammarCompiler) -> None:
    refused: list[Grammar] = []

    def check(grammar: Grammar) -> None:
        refused.append(grammar)
        raise GrammarError("no text is valid")

    choice = ToolChoice("required")
    grammar = build_tool_grammar([WEATHER, POINT], choice, "json", check=check)
    assert grammar is not None
    assert refused == [build("required", "json", tools=(WEATHER, POINT))]
    assert allows(compiler, grammar, '{"name": "point-1", "parameters": {"at": "home"}}')
    assert not allows(compiler, grammar, PLAIN.replace('"C"', '"K"'))
    with pytest.raises(GrammarError, match="no text is valid"):
        build_tool_grammar([WEATHER], choice, "json", check=check)


def test_a_grammar_that_compiles_stays_as_it_is(compiler: GrammarCompiler) -> None:
    grammar = build_tool_grammar(
        TOOLS, ToolChoice("required"), "hermes", check=lambda grammar: void(compiler.compile(grammar))
    )
    assert grammar == build("required", "hermes")


def void(_: object) -> None:
    """Drop a result."""


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["array", "null"]}])
def test_arguments_are_an_object_whatever_the_schema_says(
    compiler: GrammarCompiler, parameters: dict[str, Any]
) -> None:
    with pytest.raises(GrammarError, match=r"odd.*type: wanted object"):
        build("required", "json", tools=(Tool("odd", None, parameters, strict=True),))
    grammar = build("required", "json", tools=(Tool("odd", None, parameters),))
    assert allows(compiler, grammar, '{"name": "odd", "parameters": {}}')
    assert not allows(compiler, grammar, '{"name": "odd", "parameters": "x"}')


@pytest.mark.parametrize("parameters", [{}, {"type": ["object", "null"]}, {"properties": {"a": {}}}])
def test_a_schema_that_allows_more_than_objects_allows_objects(
    compiler: GrammarCompiler, parameters: dict[str, Any]
) -> None:
    grammar = build("required", "json", tools=(Tool("any", None, parameters, strict=True),))
    assert allows(compiler, grammar, '{"name": "any", "parameters": {"a": 1}}')
    for other in ("null", "1", '"x"', "[]"):
        assert not allows(compiler, grammar, f'{{"name": "any", "parameters": {other}}}')


def test_the_same_tools_make_the_same_grammar() -> None:
    assert build("required", "hermes") == build("required", "hermes")
    assert hash(build("auto", "json")) == hash(build("auto", "json"))
