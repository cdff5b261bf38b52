"""anthropic-python, any version from 0.20."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from pydantic import BaseModel

from clients.scenarios.report import (
    CASES,
    KEY,
    MODEL,
    TIMEOUT_S,
    URL,
    expect,
    expect_calls,
    expect_error,
    expect_idle,
    expect_retries,
    expect_that,
    read_into,
    run,
    schema_of,
    user,
)

MAX_TOKENS = 512

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)

TOOLS: Any = [{"name": name, "input_schema": schema_of(name)} for name in CASES["tools"]["schemas"]]


class Person(BaseModel):
    name: str
    age: int
    tags: list[str]


def question(text: str, **fields: Any) -> Any:
    return {"model": MODEL, "max_tokens": MAX_TOKENS, "messages": [user(text)]} | fields


def ask(text: str, **fields: Any) -> Any:
    return client.messages.create(**question(text, **fields))


def collect(text: str, **fields: Any) -> tuple[str, Any]:
    """Text in pieces, and the message that the stream helper puts together."""
    with client.messages.stream(**question(text, **fields)) as stream:
        pieces = "".join(stream.text_stream)
        return pieces, stream.get_final_message()


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def calls_of(message: Any) -> list[tuple[str, Any]]:
    blocks = [block for block in message.content if block.type == "tool_use"]
    expect("distinct ids", len({block.id for block in blocks}), len(blocks))
    return [(block.name, block.input) for block in blocks]


def expect_answer(text: str, answer: str, reason: str, sequence: str | None = None, **fields: Any) -> None:
    whole = ask(text, **fields)
    expect("text", text_of(whole), answer)
    expect("role", whole.role, "assistant")
    expect("stop reason", (whole.stop_reason, whole.stop_sequence), (reason, sequence))
    pieces, streamed = collect(text, **fields)
    expect("streamed text", pieces, answer)
    expect("collected text", text_of(streamed), answer)
    expect("streamed stop reason", (streamed.stop_reason, streamed.stop_sequence), (reason, sequence))


def models() -> None:
    expect("models", [model.id for model in client.models.list()], [MODEL])
    expect("model", client.models.retrieve(MODEL).id, MODEL)


def text() -> None:
    expect_answer(CASES["text"]["ask"], CASES["text"]["answer"], "end_turn")


def emoji() -> None:
    expect_answer(CASES["emoji"]["ask"], CASES["emoji"]["answer"], "end_turn")


def prefill() -> None:
    case = CASES["prefill"]
    messages = [user(case["ask"]), {"role": "assistant", "content": case["begun"]}]
    expect_answer(case["ask"], case["answer"], "end_turn", messages=messages)


def stop() -> None:
    case = CASES["stop"]
    sequences = ["absent", case["stop"]]
    expect_answer(case["ask"], case["answer"], "stop_sequence", case["stop"], stop_sequences=sequences)


def length() -> None:
    case = CASES["length"]
    expect_answer(case["ask"], case["answer"], "max_tokens", max_tokens=case["max_tokens"])


def usage() -> None:
    case = CASES["usage"]
    whole = ask(case["ask"]).usage
    expect("input tokens", count_input(whole), case["prompt_tokens"])
    expect("output tokens", whole.output_tokens, case["completion_tokens"])
    events = {event.type: event for event in ask(case["ask"], stream=True)}
    expect(
        "input tokens at the start", count_input(events["message_start"].message.usage), case["prompt_tokens"]
    )
    expect("output tokens at the end", events["message_delta"].usage.output_tokens, case["completion_tokens"])


def count_input(usage: Any) -> int:
    """Tokens of the prompt, those from the prefix cache too, which old versions read as a plain field."""
    return int(usage.input_tokens + usage.model_dump()["cache_read_input_tokens"])


def count_tokens() -> None:
    case = CASES["usage"]
    count = client.messages.count_tokens(model=MODEL, messages=[user(case["ask"])])  # type: ignore[list-item]
    expect("input tokens", count.input_tokens, case["prompt_tokens"])


def tools() -> None:
    case = CASES["tools"]
    whole = ask(case["ask"], tools=TOOLS)
    expect_calls(calls_of(whole), [[case["name"], case["arguments"]]])
    expect("text", text_of(whole), "")
    expect("stop reason", whole.stop_reason, "tool_use")
    pieces, streamed = collect(case["ask"], tools=TOOLS)
    expect_calls(calls_of(streamed), [[case["name"], case["arguments"]]])
    expect("streamed text", pieces, "")
    expect("streamed stop reason", streamed.stop_reason, "tool_use")


def parallel_tools() -> None:
    case = CASES["parallel_tools"]
    whole = ask(case["ask"], tools=TOOLS)
    expect_calls(calls_of(whole), case["calls"])
    expect("text", text_of(whole).strip(), case["text"])
    expect("blocks", [block.type for block in whole.content], ["text", "tool_use", "tool_use"])
    pieces, streamed = collect(case["ask"], tools=TOOLS)
    expect_calls(calls_of(streamed), case["calls"])
    expect("streamed text", pieces, text_of(whole))
    one = {"type": "auto", "disable_parallel_tool_use": True}
    expect_calls(calls_of(ask(case["ask"], tools=TOOLS, tool_choice=one)), case["calls"][:1])


def tool_choice() -> None:
    case = CASES["tool_choice"]
    expect("text", text_of(ask(case["ask"], tools=TOOLS)), case["unforced"])
    for choice in ({"type": "any"}, {"type": "tool", "name": case["name"]}):
        forced = ask(case["ask"], tools=TOOLS, tool_choice=choice)
        expect_calls(calls_of(forced), [[case["name"], case["arguments"]]])
        streamed = collect(case["ask"], tools=TOOLS, tool_choice=choice)[1]
        expect_calls(calls_of(streamed), [[case["name"], case["arguments"]]])
    none = ask(CASES["tools"]["ask"], tools=TOOLS, tool_choice={"type": "none"})
    expect_calls(calls_of(none), [])
    expect("stop reason", none.stop_reason, "end_turn")


def tool_result() -> None:
    case = CASES["tool_result"]
    message = ask(case["ask"], tools=TOOLS)
    call_id = next(block.id for block in message.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call_id, "content": case["result"]}
    history = [
        user(case["ask"]),
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    expect("text", text_of(ask("", messages=history, tools=TOOLS)), case["answer"])
    result["content"] = [{"type": "text", "text": case["result"]}]
    expect("text", text_of(ask("", messages=history, tools=TOOLS)), case["answer"])


def structured() -> None:
    case = CASES["structured"]
    person = Person(**case["answer"])
    expect(
        "parsed", client.messages.parse(**question(case["ask"]), output_format=Person).parsed_output, person
    )
    streamed = collect(case["ask"], output_format=Person)[1]
    expect("parsed from a stream", streamed.parsed_output, person)
    schema = {"type": "json_schema", "schema": {**Person.model_json_schema(), "additionalProperties": False}}
    answer = ask(case["ask"], output_config={"format": schema})
    expect("object", json.loads(text_of(answer)), case["answer"])


def refusals() -> None:
    case = CASES["refusals"]
    wrong = expect_error(anthropic.UnprocessableEntityError, lambda: ask("hi", max_tokens=case["max_tokens"]))
    expect_that("the field in the message", case["field"] in str(wrong), str(wrong))
    expect_that("a request id", wrong.response.headers.get("request-id"))
    too_long = expect_error(anthropic.BadRequestError, lambda: ask("x" * case["too_long"], stream=True))
    expect_that("the limit", case["message"] in str(too_long), str(too_long))
    body: Any = too_long.body
    expect("type", (body["type"], body["error"]["type"]), ("error", "invalid_request_error"))
    expect_error(anthropic.NotFoundError, lambda: client.get("/v1/models/other", cast_to=object))
    stranger = client.with_options(api_key="wrong")
    expect_error(anthropic.AuthenticationError, lambda: stranger.messages.create(**question("hi")))


def fault() -> None:
    case = CASES["fault"]
    expect_error(anthropic.InternalServerError, lambda: ask(case["ask"]))
    begun: list[Any] = []
    error = expect_error(anthropic.APIError, lambda: read_into(begun, ask(case["ask"], stream=True)))
    pieces = [event.delta.text for event in begun if event.type == "content_block_delta"]
    expect("text before the error", "".join(pieces), case["begun"])
    body: Any = error.body
    expect("type", body["error"]["type"], "api_error")


def cancel() -> None:
    stream = ask(CASES["cancel"]["ask"], stream=True, max_tokens=3500)
    next(event for event in stream if event.type == "content_block_delta")
    stream.response.close()
    expect_idle()


def retries() -> None:
    patient = client.with_options(max_retries=2)
    expect_retries(lambda text: text_of(patient.messages.create(**question(text))))


run(
    models,
    text,
    emoji,
    prefill,
    stop,
    length,
    usage,
    count_tokens,
    tools,
    parallel_tools,
    tool_choice,
    tool_result,
    structured,
    refusals,
    fault,
    cancel,
    retries,
)
