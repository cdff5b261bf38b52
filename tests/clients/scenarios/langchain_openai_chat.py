"""langchain-openai."""

from __future__ import annotations

from typing import Any

import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

from clients.scenarios.langchain_chat import Chat
from clients.scenarios.report import CASES, KEY, MODEL, TIMEOUT_S, URL, expect, expect_that, run

ENDPOINT: Any = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "timeout": TIMEOUT_S}


def make(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(**(ENDPOINT | {"max_retries": 0} | options))


chat = Chat(
    make,
    openai,
    finish_key="finish_reason",
    reasons={"end": "stop", "stop": "stop", "length": "length", "tools": "tool_calls"},
)


def choices() -> None:
    case = CASES["choices"]
    generations = make(n=2).generate([[HumanMessage(case["ask"])]]).generations[0]
    expect("choices", [generation.text for generation in generations], [case["answer"]] * 2)


def logprobs() -> None:
    case = CASES["logprobs"]
    model = chat.model.bind(logprobs=True, top_logprobs=case["top"])
    for message in (model.invoke(case["ask"]), chat.collect(case["ask"], model)):
        entries = message.response_metadata["logprobs"]["content"]
        expect("bytes", bytes(byte for entry in entries for byte in entry["bytes"]).decode(), case["answer"])
        expect(
            "alternatives", [len(entry["top_logprobs"]) for entry in entries], [case["top"]] * len(entries)
        )
        expect_that("log-probabilities", all(entry["logprob"] <= 0 for entry in entries))


def completions() -> None:
    case = CASES["completions"]
    model = OpenAI(**ENDPOINT, max_retries=0, max_tokens=case["max_tokens"])
    expect("text", model.invoke(case["prompt"]), case["answer"])
    expect("streamed text", "".join(model.stream(case["prompt"])), case["answer"])


def json_mode() -> None:
    case = CASES["json_mode"]
    model = chat.model.with_structured_output(None, method="json_mode")
    expect("object", model.invoke(case["ask"]), case["answer"])


run(
    chat.text,
    chat.emoji,
    chat.stop,
    chat.length,
    chat.usage,
    choices,
    logprobs,
    completions,
    chat.tools,
    chat.parallel_tools,
    chat.tool_choice,
    chat.tool_result,
    json_mode,
    chat.structured,
    chat.refusals,
    chat.fault,
    chat.cancel,
    chat.retries,
)
