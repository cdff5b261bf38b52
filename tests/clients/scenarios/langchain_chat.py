"""LangChain's chat models, whatever they wrap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from pydantic import BaseModel

from clients.scenarios.report import (
    CASES,
    expect,
    expect_calls,
    expect_error,
    expect_idle,
    expect_retries,
    expect_that,
    read_into,
    schema_of,
)

TOOLS = [
    StructuredTool(name=name, description="A tool.", args_schema=schema_of(name), func=lambda **_: "")
    for name in CASES["tools"]["schemas"]
]


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    tags: list[str]


class Chat:
    """The scenarios that every chat model shares.

    Args:
        make: makes the model from further options.
        sdk: errors of the SDK that it wraps.
        finish_key: where ``response_metadata`` has the reason of the end.
        reasons: what is said of an end of turn, a stop string, the length limit and tool calls.
    """

    def __init__(
        self,
        make: Callable[..., BaseChatModel],
        sdk: Any,
        *,
        finish_key: str,
        reasons: Mapping[str, str],
    ) -> None:
        self.make = make
        self.model = make()
        self.sdk = sdk
        self._finish_key = finish_key
        self._reasons = reasons

    def collect(self, question: Any, model: Any = None, **fields: Any) -> Any:
        """All chunks of a stream, added up."""
        total = None
        for chunk in (model or self.model).stream(question, **fields):
            total = chunk if total is None else total + chunk
        return total

    def finish_of(self, message: BaseMessage) -> Any:
        """Why the answer ended."""
        return message.response_metadata.get(self._finish_key)

    def expect_answer(self, question: Any, answer: str, reason: str, **fields: Any) -> None:
        """Whole and streamed are as they should."""
        for message in (self.model.invoke(question, **fields), self.collect(question, **fields)):
            expect("text", message.text, answer)
            expect("reason of the end", self.finish_of(message), self._reasons[reason])

    def text(self) -> None:
        self.expect_answer(CASES["text"]["ask"], CASES["text"]["answer"], "end")

    def emoji(self) -> None:
        self.expect_answer(CASES["emoji"]["ask"], CASES["emoji"]["answer"], "end")

    def stop(self) -> None:
        case = CASES["stop"]
        self.expect_answer(case["ask"], case["answer"], "stop", stop=[case["stop"]])

    def length(self) -> None:
        case = CASES["length"]
        self.expect_answer(case["ask"], case["answer"], "length", max_tokens=case["max_tokens"])

    def usage(self) -> None:
        case = CASES["usage"]
        model = self.make(stream_usage=True)
        for message in (model.invoke(case["ask"]), self.collect(case["ask"], model)):
            usage: Any = message.usage_metadata
            expect("input tokens", usage["input_tokens"], case["prompt_tokens"])
            expect("output tokens", usage["output_tokens"], case["completion_tokens"])

    def tools(self) -> None:
        case = CASES["tools"]
        model = self.model.bind_tools(TOOLS)
        for message in (model.invoke(case["ask"]), self.collect(case["ask"], model)):
            expect_calls(calls_of(message), [[case["name"], case["arguments"]]])
            expect("text", message.text, "")
            expect("reason of the end", self.finish_of(message), self._reasons["tools"])

    def parallel_tools(self) -> None:
        case = CASES["parallel_tools"]
        model = self.model.bind_tools(TOOLS)
        for message in (model.invoke(case["ask"]), self.collect(case["ask"], model)):
            expect_calls(calls_of(message), case["calls"])
            expect("text", message.text.strip(), case["text"])
        single = self.model.bind_tools(TOOLS, parallel_tool_calls=False)
        expect_calls(calls_of(single.invoke(case["ask"])), case["calls"][:1])

    def tool_choice(self) -> None:
        case = CASES["tool_choice"]
        unforced = self.model.bind_tools(TOOLS).invoke(case["ask"])
        expect("text", unforced.text, case["unforced"])
        for choice in ("any", case["name"]):
            model = self.model.bind_tools(TOOLS, tool_choice=choice)
            for message in (model.invoke(case["ask"]), self.collect(case["ask"], model)):
                expect_calls(calls_of(message), [[case["name"], case["arguments"]]])

    def tool_result(self) -> None:
        case = CASES["tool_result"]
        model = self.model.bind_tools(TOOLS)
        call: Any = model.invoke(case["ask"])
        result = ToolMessage(case["result"], tool_call_id=call.tool_calls[0]["id"])
        answer = model.invoke([HumanMessage(case["ask"]), call, result])
        expect("text", answer.text, case["answer"])

    def structured(self) -> None:
        case = CASES["structured"]
        person = Person(**case["answer"])
        by_schema = self.model.with_structured_output(Person, method="json_schema")
        expect("parsed", by_schema.invoke(case["ask"]), person)
        by_tool = self.model.with_structured_output(Person, method="function_calling")
        ask = case["ask"].replace("say:", "call:Person ")
        expect("parsed from a call", by_tool.invoke(ask), person)

    def refusals(self) -> None:
        case = CASES["refusals"]
        wrong = expect_error(
            self.sdk.UnprocessableEntityError,
            lambda: self.model.invoke("hi", max_tokens=case["max_tokens"]),
        )
        expect_that("the field in the message", case["field"] in str(wrong), str(wrong))
        too_long: Any = expect_error(ContextOverflowError, lambda: self.model.invoke("x" * case["too_long"]))
        expect_that("the limit", case["message"] in str(too_long), str(too_long))
        expect_that("a request id", too_long.request_id)
        stranger = self.make(api_key="wrong")
        expect_error(self.sdk.AuthenticationError, lambda: stranger.invoke("hi"))

    def fault(self) -> None:
        case = CASES["fault"]
        expect_error(self.sdk.InternalServerError, lambda: self.model.invoke(case["ask"]))
        begun: list[Any] = []
        expect_error(self.sdk.APIError, lambda: read_into(begun, self.model.stream(case["ask"])))
        expect("text before the error", "".join(chunk.text for chunk in begun), case["begun"])

    def cancel(self) -> None:
        stream = self.model.stream(CASES["cancel"]["ask"], max_tokens=3500)
        next(chunk for chunk in stream if chunk.text)
        stream.close()  # type: ignore[attr-defined]
        expect_idle()

    def retries(self) -> None:
        patient = self.make(max_retries=2)
        expect_retries(lambda text: patient.invoke(text).text)


def calls_of(message: AIMessage) -> list[tuple[str, Any]]:
    """Names and arguments of the tool calls."""
    expect("invalid calls", message.invalid_tool_calls, [])
    return [(call["name"], call["args"]) for call in message.tool_calls]
