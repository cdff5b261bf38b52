"""The Anthropic protocol: ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from astrai_server.anthropic.block import ContentBlock, ResultBlock
from astrai_server.anthropic.messages import AnthropicResponseBuilder, count_tokens
from astrai_server.anthropic.request import Message, MessagesRequest, PromptRequest
from astrai_server.anthropic.tool import MessagesTool

__all__ = [
    "AnthropicResponseBuilder",
    "ContentBlock",
    "Message",
    "MessagesRequest",
    "MessagesTool",
    "PromptRequest",
    "ResultBlock",
    "count_tokens",
]
