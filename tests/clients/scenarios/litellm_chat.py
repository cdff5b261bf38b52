"""LiteLLM, which shows every provider as OpenAI would answer."""

from __future__ import annotations

import json
from typing import Any

import litellm
import openai
from pydantic import BaseModel

from clients.scenarios.report import (
    CASES,
    KEY,
    MODEL,
    TIMEOUT_S,
    expect,
    expect_calls,
    expect_error,
    expect_idle,
    expect_retries,
    expect_that,
    read_into,
    schema_of,
    user,
)

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema_of(name)}}
    for name in CASES["tools"]["schemas"]
]


class Person(BaseModel):
    name: str
    age: int
    tags: list[str]


class Chat:
    """The scenarios that every provider shares.

    Args:
        provider: what stands before the model's name.
        url: where the API begins.
        json_tool: name of the tool whose call stands for a structured answer; None where none does.
    """

    def __init__(self, provider: str, url: str, *, json_tool: str | None = None) -> None:
        self.json_tool = json_tool
        self.endpoint = {
            "model": f"{provider}/{MODEL}",
            "api_base": url,
            "api_key": KEY,
            "timeout": TIMEOUT_S,
            "max_retries": 0,
        }

    def ask(self, text: str, **fields: Any) -> Any:
        """One question."""
        return litellm.completion(**(self.endpoint | {"messages": [user(text)]} | fields))

    def collect(self, text: str, **fields: Any) -> Any:
        """One question whose stream the client puts together again."""
        chunks = list(self.ask(text, stream=True, **fields))
        return litellm.stream_chunk_builder(chunks, messages=[user(text)])

    def both(self, text: str, **fields: Any) -> list[Any]:
        """The first choice, whole and streamed."""
        return [self.ask(text, **fields).choices[0], self.collect(text, **fields).choices[0]]

    def expect_answer(self, text: str, answer: str, finish: str, **fields: Any) -> None:
        """Whole and streamed are as they should."""
        for choice in self.both(text, **fields):
            expect("text", choice.message.content, answer)
            expect("finish reason", choice.finish_reason, finish)

    def text(self) -> None:
        self.expect_answer(CASES["text"]["ask"], CASES["text"]["answer"], "stop")

    def emoji(self) -> None:
        self.expect_answer(CASES["emoji"]["ask"], CASES["emoji"]["answer"], "stop")

    def stop(self) -> None:
        case = CASES["stop"]
        self.expect_answer(case["ask"], case["answer"], "stop", stop=[case["stop"]])

    def length(self) -> None:
        case = CASES["length"]
        self.expect_answer(case["ask"], case["answer"], "length", max_tokens=case["max_tokens"])

    def usage(self) -> None:
        case = CASES["usage"]
        options = {"stream_options": {"include_usage": True}}
        for answer in (self.ask(case["ask"]), self.collect(case["ask"], **options)):
            expect("prompt tokens", answer.usage.prompt_tokens, case["prompt_tokens"])
            expect("completion tokens", answer.usage.completion_tokens, case["completion_tokens"])

    def tools(self) -> None:
        case = CASES["tools"]
        for choice in self.both(case["ask"], tools=TOOLS):
            expect_calls(calls_of(choice.message), [[case["name"], case["arguments"]]])
            expect("text", choice.message.content or "", "")
            expect("finish reason", choice.finish_reason, "tool_calls")

    def parallel_tools(self) -> None:
        case = CASES["parallel_tools"]
        for choice in self.both(case["ask"], tools=TOOLS):
            expect_calls(calls_of(choice.message), case["calls"])
            expect("text", choice.message.content.strip(), case["text"])
        single = self.ask(case["ask"], tools=TOOLS, parallel_tool_calls=False).choices[0]
        expect_calls(calls_of(single.message), case["calls"][:1])

    def tool_choice(self) -> None:
        case = CASES["tool_choice"]
        unforced = self.ask(case["ask"], tools=TOOLS).choices[0]
        expect("text", unforced.message.content, case["unforced"])
        named = {"type": "function", "function": {"name": case["name"]}}
        for choice in ("required", named):
            for forced in self.both(case["ask"], tools=TOOLS, tool_choice=choice):
                expect_calls(calls_of(forced.message), [[case["name"], case["arguments"]]])
        none = self.ask(CASES["tools"]["ask"], tools=TOOLS, tool_choice="none").choices[0]
        expect_calls(calls_of(none.message), [])

    def tool_result(self) -> None:
        case = CASES["tool_result"]
        message = self.ask(case["ask"], tools=TOOLS).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": case["result"]}
        answer = self.ask("", messages=[user(case["ask"]), message, result], tools=TOOLS)
        expect("text", answer.choices[0].message.content, case["answer"])

    def structured(self) -> None:
        case = CASES["structured"]
        ask = (
            case["ask"] if self.json_tool is None else case["ask"].replace("say:", f"call:{self.json_tool} ")
        )
        for choice in self.both(ask, response_format=Person):
            parsed = Person.model_validate_json(choice.message.content)
            expect("parsed", parsed, Person(**case["answer"]))

    def refusals(self) -> None:
        case = CASES["refusals"]
        wrong = expect_error(openai.APIStatusError, lambda: self.ask("hi", max_tokens=case["max_tokens"]))
        expect_that("the field in the message", case["field"] in str(wrong), str(wrong))
        too_long = expect_error(
            litellm.ContextWindowExceededError, lambda: self.ask("x" * case["too_long"], stream=True)
        )
        expect_that("the limit", case["message"] in str(too_long), str(too_long))
        expect_error(litellm.AuthenticationError, lambda: self.ask("hi", api_key="wrong"))

    def fault(self) -> None:
        case = CASES["fault"]
        expect_error(litellm.InternalServerError, lambda: self.ask(case["ask"]))
        begun: list[Any] = []
        expect_error(openai.APIError, lambda: read_into(begun, self.ask(case["ask"], stream=True)))
        texts = (chunk.choices[0].delta.content or "" for chunk in begun)
        expect("text before the error", "".join(texts), case["begun"])

    def cancel(self) -> None:
        stream = self.ask(CASES["cancel"]["ask"], stream=True, max_tokens=3500)
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        stream.close()
        expect_idle()

    def retries(self) -> None:
        expect_retries(lambda text: self.ask(text, max_retries=2).choices[0].message.content)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """Names and arguments of the tool calls."""
    calls = message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]
