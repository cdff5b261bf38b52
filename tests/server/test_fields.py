"""Every field that clients can send is honoured, refused by name, or listed as accepted without effect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import anthropic.types
import attrs
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_messages
from openai.types import chat, completion_create_params, shared_params
from openai.types.chat import completion_create_params as chat_params

from astrai_server.anthropic import (
    AnthropicResponseBuilder,
    ContentBlock,
    Message,
    MessagesRequest,
    MessagesTool,
    PromptRequest,
    ResultBlock,
)
from astrai_server.anthropic.tool import OutputConfig, OutputFormat
from astrai_server.anthropic.tool import ToolChoice as MessagesToolChoice
from astrai_server.openai import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    CompletionResponseBuilder,
    ContentPart,
    OpenAIResponseBuilder,
    StreamOptions,
    ToolCall,
    ToolDefinition,
)
from astrai_server.openai.tool import FunctionDefinition, JsonSchemaFormat
from astrai_server.sse import encode_json
from astrai_server.wire import InvalidRequestError, read_request
from fake_engine import FakeEngine, chat_body

README = (Path(__file__).parents[2] / "README.md").read_text()

CHAT, COMPLETION, MESSAGES = ChatCompletionRequest, CompletionRequest, MessagesRequest
BUILDERS: Mapping[Any, Any] = {
    CHAT: OpenAIResponseBuilder(),
    COMPLETION: CompletionResponseBuilder(),
    MESSAGES: AnthropicResponseBuilder(),
}
TITLES = {CHAT: "`/v1/chat/completions`", COMPLETION: "`/v1/completions`", MESSAGES: "`/v1/messages`"}

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOLS = {CHAT: [{"type": "function", "function": FUNCTION}], MESSAGES: [{"name": "f", "input_schema": {}}]}
NAMED = {CHAT: {"type": "function", "function": {"name": "f"}}, MESSAGES: {"type": "tool", "name": "f"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}

SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "min_tokens": 1,
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "stop": "x",
    "stop_sequences": ["x"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "seed": 3,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 2,
    "logit_bias": {"3": 1},
}
# Field -> a body in which it matters, without it and with it.
OTHERS: dict[Any, dict[str, tuple[dict[str, Any], Any]]] = {
    CHAT: {
        "messages": ({}, [{"role": "user", "content": "other"}]),
        "model": ({}, "m"),
        "stream": ({}, True),
        "stream_options": ({"stream": True}, {"include_usage": True}),
        "n": ({}, 2),
        "logprobs": ({}, True),
        "top_logprobs": ({"logprobs": True}, 2),
        "tools": ({}, TOOLS[CHAT]),
        "tool_choice": ({"tools": TOOLS[CHAT]}, "required"),
        "parallel_tool_calls": ({"tools": TOOLS[CHAT], "tool_choice": "required"}, False),
        "response_format": ({}, {"type": "json_object"}),
    },
    COMPLETION: {
        "prompt": ({}, "other"),
        "model": ({}, "m"),
        "stream": ({}, True),
        "stream_options": ({"stream": True}, {"include_usage": True}),
        "n": ({}, 2),
        "best_of": ({"n": 2}, 2),
        "logprobs": ({}, 1),
        "echo": ({}, True),
    },
    MESSAGES: {
        "messages": ({}, [{"role": "user", "content": "other"}]),
        "model": ({}, "m"),
        "stream": ({}, True),
        "system": ({}, "rules"),
        "tools": ({}, TOOLS[MESSAGES]),
        "tool_choice": ({"tools": TOOLS[MESSAGES]}, NAMED[MESSAGES]),
        "output_config": ({}, {"format": FORMAT}),
        "output_format": ({}, FORMAT),
    },
}
# What asks for what every request does anyway.
NO_CHANGE = {(COMPLETION, "best_of")}

# The clients' own words for a class of ours.
SDK_PARAMS: list[tuple[type, Any]] = [
    (CHAT, chat_params.CompletionCreateParamsBase),
    (CHAT, chat_params.CompletionCreateParamsStreaming),
    (COMPLETION, completion_create_params.CompletionCreateParamsBase),
    (MESSAGES, message_create_params.MessageCreateParamsBase),
    (MESSAGES, beta_messages.MessageCreateParamsBase),
    (PromptRequest, message_count_tokens_params.MessageCountTokensParams),
    (ChatMessage, chat.ChatCompletionSystemMessageParam),
    (ChatMessage, chat.ChatCompletionDeveloperMessageParam),
    (ChatMessage, chat.ChatCompletionUserMessageParam),
    (ChatMessage, chat.ChatCompletionAssistantMessageParam),
    (ChatMessage, chat.ChatCompletionToolMessageParam),
    (ContentPart, chat.ChatCompletionContentPartTextParam),
    (ContentPart, chat.ChatCompletionContentPartRefusalParam),
    (ToolCall, chat.ChatCompletionMessageFunctionToolCallParam),
    (ToolDefinition, chat.ChatCompletionFunctionToolParam),
    (FunctionDefinition, shared_params.FunctionDefinition),
    (JsonSchemaFormat, shared_params.response_format_json_schema.JSONSchema),
    (StreamOptions, chat.ChatCompletionStreamOptionsParam),
    *((Message, param) for param in get_args(anthropic.types.MessageParam)),
    (ContentBlock, anthropic.types.TextBlockParam),
    (ContentBlock, anthropic.types.ToolUseBlockParam),
    (ContentBlock, anthropic.types.ToolResultBlockParam),
    (ContentBlock, anthropic.types.ThinkingBlockParam),
    (ContentBlock, anthropic.types.RedactedThinkingBlockParam),
    (ResultBlock, anthropic.types.TextBlockParam),
    (MessagesTool, anthropic.types.ToolParam),
    (MessagesToolChoice, anthropic.types.ToolChoiceToolParam),
    (MessagesToolChoice, anthropic.types.ToolChoiceAnyParam),
    (MessagesToolChoice, anthropic.types.ToolChoiceAutoParam),
    (OutputConfig, anthropic.types.OutputConfigParam),
    (OutputFormat, anthropic.types.JSONOutputFormatParam),
]
# Sent as a header.
NOT_IN_BODY = {"betas"}


def body_of(kind: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    return ({"prompt": "hi"} if kind is COMPLETION else chat_body()) | dict(fields)


def is_refused(field: attrs.Attribute[Any]) -> bool:
    return getattr(field.validator, "__qualname__", "").startswith("not_yet.")


def list_honoured(kind: Any) -> list[str]:
    return [field.name for field in attrs.fields(kind) if not is_refused(field)]


def list_refused(kind: Any) -> list[str]:
    return [field.name for field in attrs.fields(kind) if is_refused(field)]


def list_cases(names: Any) -> Iterator[tuple[Any, str]]:
    return ((kind, name) for kind in BUILDERS for name in sorted(names(kind)))


def describe(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Everything that the answer will depend on."""
    request = read_request(encode_json(body_of(kind, fields)), kind)[0]
    context = BUILDERS[kind].prepare(request, FakeEngine())
    hidden = {"id", "created", "make_parser", "tokenizer", "text_frames", "head", "block"}
    seen = {field.name: getattr(context, field.name) for field in attrs.fields(type(context))}
    has_parser = context.make_parser is not None
    return {name: value for name, value in seen.items() if name not in hidden} | {"parser": has_parser}


@pytest.mark.parametrize(("kind", "sdk"), SDK_PARAMS, ids=lambda item: getattr(item, "__name__", str(item)))
def test_every_field_of_an_official_client_is_known(kind: Any, sdk: Any) -> None:
    known = {field.name for field in attrs.fields(kind)} | getattr(kind, "WITHOUT_EFFECT", frozenset())
    assert set(sdk.__annotations__) - known - NOT_IN_BODY == set()


@pytest.mark.parametrize(("kind", "name"), list(list_cases(list_honoured)))
def test_an_honoured_field_changes_the_answer(kind: Any, name: str) -> None:
    others, value = OTHERS[kind][name] if name in OTHERS[kind] else ({}, SAMPLING[name])
    changed = describe(kind, {**others, name: value}) != describe(kind, others)
    assert changed is ((kind, name) not in NO_CHANGE)


@pytest.mark.parametrize(("kind", "name"), list(list_cases(list_refused)))
def test_a_refused_field_is_named(kind: Any, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_request(encode_json(body_of(kind, {name: {"any": 1}})), kind)
    assert [(issue.path, issue.is_unsupported) for issue in caught.value.issues] == [((name,), True)]


@pytest.mark.parametrize(("kind", "name"), list(list_cases(lambda kind: kind.WITHOUT_EFFECT)))
def test_a_field_without_effect_changes_nothing(kind: Any, name: str) -> None:
    assert describe(kind, {name: {"any": 1}}) == describe(kind, {})


def test_the_three_sets_have_nothing_in_common() -> None:
    for kind in BUILDERS:
        fields = {field.name for field in attrs.fields(kind)}
        assert not fields & kind.WITHOUT_EFFECT


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_readme_lists_the_fields(kind: Any) -> None:
    sets = (list_honoured(kind), list_refused(kind), kind.WITHOUT_EFFECT)
    row = next(line for line in README.splitlines() if line.startswith(f"| {TITLES[kind]} | `"))
    cells = [re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[2:5]]
    assert [sorted(cell) for cell in cells] == [sorted(names) for names in sets]
