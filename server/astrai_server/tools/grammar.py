"""What an answer may look like, so that every call in it is one that was offered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from astrai_server.conversation import Tool, ToolChoice
from astrai_server.tools.parser import CLOSING_TAG, OPENING_TAG, ToolFormat
from astrai_triton.errors import GrammarError
from astrai_triton.grammar.spec import Grammar, embed_schema

MAX_CALLS = 8
"""Calls in one answer, where a call is all that it may consist of."""

_DEFINITIONS = ("$defs", "definitions")
_MOVABLE = ("#/$defs/", "#/definitions/")
_ANY_OBJECT = embed_schema({"type": "object"})

# Text in which no call is found: it begins, after white space, with none of the ways to begin a plain one.
_PLAIN_TEXT = r"/[\s\x1c-\x1f]*([^\s\x1c-\x1f\[{<](.|\n)*|<([^|](.|\n)*)?)?/"
_ANY_TEXT = r"/(.|\n)*/"
# Of a call, behind its opening tag.
_REST = f'rest: "\\n" object "\\n{CLOSING_TAG}"'


def build_tool_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    tool_format: ToolFormat,
    *,
    answer: Grammar | None = None,
    check: Callable[[Grammar], None] | None = None,
) -> Grammar | None:
    """The grammar of an answer to a request with tools.

    Where a call is required, the answer is one call, or up to ``MAX_CALLS`` of them; where it is not and a
    tool is strict, it is free text in which each call that begins is valid to its end; where the text has a
    form of its own, it is calls or that. Arguments are valid under the tool's schema. Where the schema of a
    tool that is not strict cannot be enforced, they are any object.

    Args:
        tools: of the request.
        choice: whether the model has to call one of them, and which.
        tool_format: how the model writes calls; ``auto`` is ``hermes``.
        answer: a JSON Schema that the answer follows where it calls nothing; None is any text.
        check: raises what compiling the grammar raises, e.g. ``engine.compile_grammar``: then the schemas of
            tools that are not strict are left out. None: all that look right are in it.

    Returns:
        None where the model may write what it likes.

    Raises:
        GrammarError: the schema of a strict tool, or of the answer, cannot be enforced.
    """
    if choice.mode == "none" or not tools:
        return answer
    if choice.mode == "auto" and answer is None and not any(tool.strict for tool in tools):
        return None
    callable_tools = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    text = None if answer is None else embed_schema(json.loads(answer.source))
    grammar = _write(callable_tools, choice, tool_format, text)
    if check is not None:
        try:
            check(grammar)
        except GrammarError:
            if all(tool.strict for tool in callable_tools):
                raise
            return _write(callable_tools, choice, tool_format, text, is_lenient=True)
    return grammar


def _write(
    tools: Sequence[Tool],
    choice: ToolChoice,
    tool_format: ToolFormat,
    text: str | None,
    *,
    is_lenient: bool = False,
) -> Grammar:
    if choice.mode == "auto" and text is None:
        rules = _write_free(choice, tool_format)
    else:
        rules = _write_calls(choice, tool_format)
        if choice.mode == "auto":
            rules = [f"{rules[0]} | text", *rules[1:], f"text: %json {text}"]
    rules.append("object: " + " | ".join(f"tool_{i}" for i in range(len(tools))))
    key = "parameters" if tool_format == "json" else "arguments"
    for i, tool in enumerate(tools):
        if tool_format == "json" and text is not None:
            # Both begin with a brace: only where they share their lexemes can the lexer tell them apart late.
            rules.append(f"tool_{i}: %json {_write_object(tool, is_lenient=is_lenient)}")
            continue
        schema = _ANY_OBJECT if is_lenient and not tool.strict else _choose_schema(tool)
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        rules.append(f'tool_{i}: {_quote(head)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {schema}")
    return Grammar.lark("\n".join(rules) + "\n")


def _write_calls(choice: ToolChoice, tool_format: ToolFormat) -> list[str]:
    """Rules of an answer that is calls and nothing else."""
    separator = _quote("; " if tool_format == "json" else "\n")
    more = f" ({separator} call){{0,{MAX_CALLS - 1}}}" if choice.is_parallel else ""
    if tool_format == "json":
        return [f"start: call{more}", "call: object"]
    return [f"start: call{more}", f"call: {_quote(OPENING_TAG)} rest", _REST]


def _write_free(choice: ToolChoice, tool_format: ToolFormat) -> list[str]:
    """Rules of an answer that may be text, and in which what begins as a call is one."""
    first = _ANY_TEXT if tool_format == "hermes" else _PLAIN_TEXT
    if tool_format == "json":
        calls, call = _write_calls(choice, tool_format)
        return [f"{calls} | FIRST", call, f"FIRST: {first}"]
    # A lazy rule ends with the first tag: text can hold none.
    rules = [f"first[lazy]: FIRST {_quote(OPENING_TAG)}", f"FIRST: {first}", _REST]
    if not choice.is_parallel:
        return ["start: FIRST | first rest", *rules]
    return [
        "start: FIRST | first rest (later rest)* TEXT",
        *rules,
        f"later[lazy]: TEXT {_quote(OPENING_TAG)}",
        f"TEXT: {_ANY_TEXT}",
    ]


def _write_object(tool: Tool, *, is_lenient: bool) -> str:
    """The schema of a whole plain call."""

    def wrap(parameters: Mapping[str, Any]) -> str:
        inner = {key: value for key, value in parameters.items() if key not in _DEFINITIONS}
        outer = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
        properties = {"name": {"const": tool.name}, "parameters": {**inner, "type": "object"}}
        call = {"type": "object", "properties": properties, "required": list(properties)}
        return embed_schema({**call, "additionalProperties": False, **outer})

    # Of references, only those to definitions still lead to where they did.
    is_movable = all(ref.startswith(_MOVABLE) for ref in _list_refs(tool.parameters))
    try:
        if not is_movable:
            raise GrammarError(
                "$ref: wanted #/$defs/…, which is all that is supported beside an answer's form"
            )
        return wrap({"type": "object"} if is_lenient and not tool.strict else tool.parameters)
    except GrammarError as error:
        if tool.strict:
            raise GrammarError(f"tool {tool.name}: {error}") from error
        return wrap({"type": "object"})


def _list_refs(value: Any) -> Iterator[str]:
    """Every reference in a schema."""
    if isinstance(value, Mapping):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from _list_refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _list_refs(item)


def _choose_schema(tool: Tool) -> str:
    """What a tool's arguments are valid under: an object, whatever else its schema leaves open."""
    kind = tool.parameters.get("type", "object")
    try:
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise GrammarError(f"type: wanted object, got {json.dumps(kind)}; arguments are always an object")
        return embed_schema({**tool.parameters, "type": "object"})
    except GrammarError as error:
        if tool.strict:
            raise GrammarError(f"tool {tool.name}: {error}") from error
        return _ANY_OBJECT


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
