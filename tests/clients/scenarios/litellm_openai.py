"""LiteLLM with an OpenAI endpoint."""

from __future__ import annotations

import json

import litellm

from clients.scenarios.litellm_chat import Chat
from clients.scenarios.report import CASES, MODEL, URL, expect, expect_that, run

chat = Chat("openai", f"{URL}/v1")


def choices() -> None:
    case = CASES["choices"]
    answers = [choice.message.content for choice in chat.ask(case["ask"], n=2).choices]
    expect("choices", answers, [case["answer"]] * 2)


def logprobs() -> None:
    case = CASES["logprobs"]
    entries = chat.ask(case["ask"], logprobs=True, top_logprobs=case["top"]).choices[0].logprobs.content
    expect("bytes", bytes(byte for entry in entries for byte in entry.bytes).decode(), case["answer"])
    expect("alternatives", [len(entry.top_logprobs) for entry in entries], [case["top"]] * len(entries))
    expect_that("log-probabilities", all(entry.logprob <= 0 for entry in entries))


def completions() -> None:
    case = CASES["completions"]
    endpoint = chat.endpoint | {"model": f"text-completion-openai/{MODEL}", "max_tokens": case["max_tokens"]}
    whole = litellm.text_completion(**endpoint, prompt=case["prompt"])
    expect("text", whole.choices[0].text, case["answer"])
    chunks = litellm.text_completion(**endpoint, prompt=case["prompt"], stream=True)
    expect("streamed text", "".join(chunk.choices[0].text or "" for chunk in chunks), case["answer"])


def json_mode() -> None:
    case = CASES["json_mode"]
    for choice in chat.both(case["ask"], response_format={"type": "json_object"}):
        expect("object", json.loads(choice.message.content), case["answer"])


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
