"""langchain-anthropic."""

from __future__ import annotations

from typing import Any

import anthropic
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage

from clients.scenarios.langchain_chat import Chat
from clients.scenarios.report import CASES, KEY, MODEL, TIMEOUT_S, URL, expect, run


def make(**options: Any) -> ChatAnthropic:
    endpoint = {"model": MODEL, "base_url": URL, "api_key": KEY, "timeout": TIMEOUT_S, "max_retries": 0}
    return ChatAnthropic(**(endpoint | options))


chat = Chat(
    make,
    anthropic,
    finish_key="stop_reason",
    reasons={"end": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "tools": "tool_use"},
)


def prefill() -> None:
    case = CASES["prefill"]
    question = [("user", case["ask"]), ("assistant", case["begun"])]
    chat.expect_answer(question, case["answer"], "end")


def count_tokens() -> None:
    case = CASES["usage"]
    count = chat.model.get_num_tokens_from_messages([HumanMessage(case["ask"])])
    expect("tokens", count, case["prompt_tokens"])


run(
    chat.text,
    chat.emoji,
    prefill,
    chat.stop,
    chat.length,
    chat.usage,
    count_tokens,
    chat.tools,
    chat.parallel_tools,
    chat.tool_choice,
    chat.tool_result,
    chat.structured,
    chat.refusals,
    chat.fault,
    chat.cancel,
    chat.retries,
)
