"""A conversation with tools, in the words of no protocol, and how it becomes a prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import attrs

from astrai_server.tools.scanner import JsonScanner
from astrai_server.wire import InvalidRequestError, Issue
from astrai_triton.errors import ChatTemplateError

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine

Role = Literal["system", "user", "assistant", "tool"]

_INSTRUCTIONS = """\
You can call functions. Each line between these tags is one of them, with a JSON schema of its arguments:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as one JSON object between these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
What the function gives back comes in the next message, between <tool_response> and </tool_response>.
{choice}"""
_CHOICES = {
    "auto": "Call a function only where the answer needs one; otherwise answer in words.",
    "required": "Your answer must call a function.",
    "named": "Your answer must call the function {name}.",
}
_PARALLEL = {
    True: "You may call several functions in one answer, each between tags of its own.",
    False: "Call at most one function in one answer.",
}


@attrs.frozen
class Call:
    """A call that the assistant made earlier."""

    id: str | None
    name: str
    arguments: str
    """JSON text of an object; other text is shown to the model as a JSON string."""


@attrs.frozen
class Turn:
    """One turn of a conversation."""

    role: Role
    text: str
    calls: tuple[Call, ...] = ()
    """Only of an assistant."""
    call_id: str | None = None
    """Of a tool: the call that this is the result of."""
    name: str | None = None
    """Of a tool: its name; None takes that of the call."""


@attrs.frozen
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments; empty is any object."""
    strict: bool = False
    """The arguments must be valid under ``parameters``, or the request is refused."""


@attrs.frozen
class ToolChoice:
    """Whether the model has to call a tool, and which."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None
    """Of the tool, where the mode is ``named``."""
    is_parallel: bool = True
    """One answer may have more than one call."""


class ChatCodec(Protocol):
    """What is asked of the engine's tokenizer."""

    @property
    def renders_tools(self) -> bool: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> list[int]: ...


def encode_conversation(
    engine: InferenceEngine,
    turns: Sequence[Turn],
    *,
    tools: Sequence[Tool] = (),
    choice: ToolChoice | None = None,
    continue_final: bool = False,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Render and tokenise a conversation.

    A chat template that knows tools gets them, and the calls and results of earlier turns, as they are. For
    any other, the tools stand at the start of the system prompt, calls in the assistant's text and results in
    the user's.

    Args:
        engine: gives the tokenizer.
        turns: oldest first.
        tools: what the model may call.
        choice: None is ``auto``; the mode ``none`` leaves the tools out.
        continue_final: the answer goes on where the last turn, the assistant's, stops.
        add_generation_prompt: end with the opening of an assistant's turn, unless the last one goes on.

    Raises:
        ChatTemplateError: the chat template refused the conversation.
        InvalidRequestError: a text that cannot be tokenised.
    """
    codec = cast(ChatCodec, engine.tokenizer)
    choice = ToolChoice("auto") if choice is None else choice
    shown = () if choice.mode == "none" else tuple(tools)

    def encode(messages: list[dict[str, Any]], described: list[dict[str, Any]] | None = None) -> list[int]:
        try:
            return codec.encode_chat(
                messages,
                add_generation_prompt=add_generation_prompt and not continue_final,
                continue_final=continue_final,
                tools=described,
            )
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(Issue(("messages",), str(error))) from error

    if codec.renders_tools:
        return encode(list(_structure_turns(turns)), [_describe_tool(tool) for tool in shown] or None)
    messages = _write_turns(turns)
    if not shown:
        return encode(messages)
    instructions = _write_instructions(shown, choice)
    try:
        return encode(_put_first(messages, "system", instructions))
    except ChatTemplateError:
        if messages and messages[0]["role"] != "user":
            raise
    # Some templates have no system prompt. Where the client wrote none either, the user's first words do.
    return encode(_put_first(messages, "user", instructions))


# For templates that know tools


def _structure_turns(turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    id_to_name: dict[str, str] = {}
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.calls:
            message["tool_calls"] = [_structure_call(call, i) for i, call in enumerate(turn.calls)]
            id_to_name.update((call.id, call.name) for call in turn.calls if call.id is not None)
        if turn.role == "tool":
            name = turn.name or id_to_name.get(turn.call_id or "")
            message |= {} if name is None else {"name": name}
            message |= {} if turn.call_id is None else {"tool_call_id": _shorten(turn.call_id)}
        yield message


def _structure_call(call: Call, index: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments if call.arguments.strip() else "{}"}
    return {"id": _shorten(call.id or str(index)), "type": "function", "function": function}


def _shorten(call_id: str) -> str:
    """Nine letters and digits: more is refused by some templates, and tells the model nothing."""
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _describe_tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        # Templates join it with other text.
        "description": tool.description or "",
        "parameters": dict(tool.parameters) or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


# For all others


def _write_turns(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Messages of role and text; results of tools become one user message with what the user says next."""
    messages: list[dict[str, Any]] = []
    is_result = False
    for turn in turns:
        text = _write_turn(turn)
        if is_result and turn.role in ("tool", "user"):
            messages[-1]["content"] += f"\n{text}"
        else:
            messages.append({"role": "user" if turn.role == "tool" else turn.role, "content": text})
        is_result = turn.role == "tool"
    return messages


def _write_turn(turn: Turn) -> str:
    if turn.role == "tool":
        return f"<tool_response>\n{turn.text}\n</tool_response>"
    calls = "\n".join(map(_write_call, turn.calls))
    return "\n".join(part for part in (turn.text, calls) if part)


def _write_call(call: Call) -> str:
    # What the model itself wrote is repeated to the letter: the prefix cache knows it.
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {_write_arguments(call.arguments)}}}\n</tool_call>'


def _write_arguments(text: str) -> str:
    text = text.strip() or "{}"
    scanner = JsonScanner(is_object=True)
    end = scanner.feed(text, 0, len(text))
    if scanner.is_complete and end == len(text):
        return scanner.take()
    return json.dumps(text, ensure_ascii=False)


def _write_instructions(tools: Sequence[Tool], choice: ToolChoice) -> str:
    """What the model is told of its tools. The list comes first: it changes least."""
    described = []
    for tool in tools:
        description = {} if tool.description is None else {"description": tool.description}
        parameters = dict(tool.parameters) or {"type": "object", "properties": {}}
        described.append({"name": tool.name, **description, "parameters": parameters})
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in described)
    told = _CHOICES[choice.mode].format(name=choice.name)
    return _INSTRUCTIONS.format(tools=lines, choice=f"{told} {_PARALLEL[choice.is_parallel]}")


def _put_first(messages: list[dict[str, Any]], role: str, text: str) -> list[dict[str, Any]]:
    """The messages with ``text`` before all that ``role`` says first."""
    if messages and messages[0]["role"] == role:
        first = {"role": role, "content": f"{text}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]]
    return [{"role": role, "content": text}, *messages]
