"""The OpenAI protocol: ``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

from astrai_server.openai.chat import OpenAIResponseBuilder
from astrai_server.openai.completion import CompletionResponseBuilder
from astrai_server.openai.frame import UsageFrame
from astrai_server.openai.message import ChatMessage, ContentPart, ToolCall
from astrai_server.openai.request import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingRequest,
    StreamOptions,
)
from astrai_server.openai.tool import ResponseFormat, ToolDefinition

__all__ = [
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "CompletionResponseBuilder",
    "ContentPart",
    "OpenAIResponseBuilder",
    "ResponseFormat",
    "SamplingRequest",
    "StreamOptions",
    "ToolCall",
    "ToolDefinition",
    "UsageFrame",
]
