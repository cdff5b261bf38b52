"""LiteLLM with an Anthropic endpoint."""

from __future__ import annotations

from clients.scenarios.litellm_chat import Chat
from clients.scenarios.report import CASES, URL, expect, run, user

chat = Chat("anthropic", URL, json_tool="json_tool_call")


def prefill() -> None:
    case = CASES["prefill"]
    messages = [user(case["ask"]), {"role": "assistant", "content": case["begun"]}]
    expect("text", chat.ask("", messages=messages).choices[0].message.content, case["answer"])


run(
    chat.text,
    chat.emoji,
    prefill,
    chat.stop,
    chat.length,
    chat.usage,
    chat.tools,
    chat.parallel_tools,
    chat.tool_choice,
    chat.tool_result,
    chat.structured,
    chat.refusals,
    chat.fault,
    chat.cancel,
)
