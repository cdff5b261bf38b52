"""A conversation -> one prompt text, by the checkpoint's Jinja template in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from astrai_triton.errors import ChatTemplateError
from astrai_triton.tokenizer.control import STAND_INS

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_PROMPT_CHARS = 1 << 26
"""Longest text a template may produce, in characters."""

ToolFormat = Literal["hermes", "json"]

# A conversation that shows what a template does with tools. Some want ids of nine letters and digits.
_PROBE_ID = "0a1b2c3d4"
_PROBE_FUNCTION = {"name": "probe_call", "arguments": {"probe_key": "probe-argument"}}
_PROBE_TOOL = {
    "name": "probe_call",
    "description": "probe-description",
    "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": ""}}},
}
_PROBE = (
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": _PROBE_ID, "type": "function", "function": _PROBE_FUNCTION}],
    },
    {"role": "tool", "content": "probe-result", "name": "probe_call", "tool_call_id": _PROBE_ID},
)

# Not stand-ins: they are to be put back, and the character they stand for needs no escape.
_TO_ESCAPE = re.compile(f"[^\x00-\x7f{STAND_INS}]")


class ChatTemplate:
    """A compiled chat template. Immutable, for any thread.

    Templates get what ``transformers`` gives them: ``messages``, ``tools``, ``documents``,
    ``add_generation_prompt``, the special tokens by name, ``raise_exception``, ``strftime_now``, a
    ``tojson`` that does not escape HTML, loop controls and the ``generation`` block.

    Args:
        source: Jinja source.
        tool_source: a second template for conversations with tools, where the checkpoint has one.
        special_tokens: name -> text, e.g. ``bos_token`` -> ``<s>``.

    Raises:
        ChatTemplateError: a template is not valid Jinja, or no text at all.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._template = _compile(source)
        self._tool_template = self._template if tool_source is None else _compile(tool_source)

    @functools.cached_property
    def tool_format(self) -> ToolFormat | None:
        """How it writes the calls of earlier turns: in ``<tool_call>`` tags, or as plain JSON.

        None where it leaves out the tools, calls or results, refuses them, or writes calls in another way.
        """
        tools = [{"type": "function", "function": _PROBE_TOOL}]
        try:
            told = self.render(_PROBE, tools=tools)
            untold = self.render(_PROBE)
        except ChatTemplateError:
            return None
        shown = ("probe-argument", "probe-result")
        if not all(mark in text for mark in shown for text in (told, untold)) or "probe-desc" not in told:
            return None
        return _find_call(told)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """Render a conversation that ``normalize_messages`` has prepared.

        Args:
            messages: role and content of each turn.
            add_generation_prompt: end with the opening of an assistant turn.
            tools: JSON schemas of the functions the model may call.

        Raises:
            ChatTemplateError: the template refused the conversation (its own words), failed, or wrote more
                than ``MAX_PROMPT_CHARS``.
        """
        template = self._tool_template if tools else self._template
        pieces, length = [], 0
        try:
            for piece in template.generate(
                **self._special_tokens,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                pieces.append(piece)
                length += len(piece)
                _check_length(length)
        except ChatTemplateError:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise ChatTemplateError(f"the chat template cannot render this conversation: {cause}") from error
        return "".join(pieces)

    def render_continued(
        self, messages: Sequence[Mapping[str, Any]], *, mark: str, tools: Sequence[Any] | None = None
    ) -> str:
        """Render a conversation whose last message, the assistant's, is to be written on.

        Args:
            messages: as for ``render``; the last is an assistant message with text content.
            mark: one character that occurs neither in the conversation nor in the template.
            tools: as for ``render``.

        Returns:
            The prompt up to the end of the last message's content. White space at that end is kept if the
            template keeps it.

        Raises:
            ChatTemplateError: as ``render``; or the last message is not the assistant's, or the template
                leaves out its end.
        """
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
            raise ChatTemplateError(
                "continue_final: wanted a last message of role 'assistant' with text content, "
                f"got role {last.get('role')!r}"
            )
        # The space after the mark shows whether the template trims.
        marked = [*messages[:-1], {**last, "content": f"{last['content']}{mark} "}]
        rendered = self.render(marked, add_generation_prompt=False, tools=tools)
        prompt, found, after = rendered.rpartition(mark)
        if not found:
            raise ChatTemplateError(
                "continue_final: the chat template does not write out the end of the last assistant message, "
                "so it cannot be continued"
            )
        return prompt if after.startswith(" ") else prompt.rstrip()


def _find_call(text: str) -> ToolFormat | None:
    """How the probe's call is written."""
    decoder = json.JSONDecoder()
    for brace in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            continue
        arguments = value.get("arguments", value.get("parameters"))
        if value.get("name") == _PROBE_FUNCTION["name"] and arguments == _PROBE_FUNCTION["arguments"]:
            is_tagged = text[: brace.start()].rstrip().endswith("<tool_call>")
            return "hermes" if is_tagged else "json"
    return None


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give every message the form that templates expect; the arguments are not changed.

    Content is text: ``None`` or nothing becomes ``""``, a list of text parts is joined. Arguments of tool
    calls that are JSON text of an object become that object.

    Raises:
        TypeError: a message is not a mapping.
        ChatTemplateError: an unknown role, or content that is not text.
    """
    normalized = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{index}]: wanted a mapping with role and content, got {message!r}")
        role = message.get("role")
        if role not in ROLES:
            raise ChatTemplateError(f"messages[{index}].role: wanted one of {', '.join(ROLES)}, got {role!r}")
        copy = {**message, "content": _text(message.get("content"), f"messages[{index}].content")}
        if copy.get("tool_calls"):
            copy["tool_calls"] = [_with_parsed_arguments(call) for call in copy["tool_calls"]]
        normalized.append(copy)
    return normalized


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise ChatTemplateError(f"{where}: wanted text or a list of text parts, got {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
        if not isinstance(text, str):
            raise ChatTemplateError(f"{where}[{index}]: wanted a part of type 'text', got {kind!r}")
        texts.append(text)
    return "".join(texts)


def _with_parsed_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = call["function"]
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        # What is not JSON is shown to the model as it is.
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it only groups."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Bounds what one operator may allocate, beside what the sandbox forbids anyway."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        for value, count in ((left, right), (right, left)):
            if operator == "*" and isinstance(count, int) and isinstance(value, (str, bytes, list, tuple)):
                _check_length(len(value) * count)
        if operator == "**" and any(isinstance(side, int) and abs(side) > 1000 for side in (left, right)):
            raise ChatTemplateError(f"the chat template computes {left} ** {right}; wanted both within 1000")
        return super().call_binop(context, operator, left, right)


def _compile(source: object) -> jinja2.Template:
    if not isinstance(source, str):
        raise ChatTemplateError(f"the chat template is not text but {type(source).__name__}")
    sandbox = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = _strftime_now
    try:
        return sandbox.from_string(source)
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        raise ChatTemplateError(f"the chat template is not valid Jinja: {error}") from error


def _check_length(length: int) -> None:
    if length > MAX_PROMPT_CHARS:
        raise ChatTemplateError(
            f"the chat template wrote more than {MAX_PROMPT_CHARS} characters; send a shorter conversation"
        )


def _refuse(message: Any) -> NoReturn:
    raise ChatTemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, which Jinja's own filter would add."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _TO_ESCAPE.sub(lambda char: json.dumps(char.group())[1:-1], text) if ensure_ascii else text
