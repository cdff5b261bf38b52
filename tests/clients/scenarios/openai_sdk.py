"""openai-python, any version from 1.3."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import openai
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

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S)

TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema_of(name)}}
    for name in CASES["tools"]["schemas"]
]


class Person(BaseModel):
    name: str
    age: int
    tags: list[str]


def ask(text: str, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=[user(text)], **fields)  # type: ignore[list-item]


def join(chunks: Iterable[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def finish_of(chunks: Iterable[Any]) -> list[str]:
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    return [reason for reason in reasons if reason is not None]


def expect_answer(text: str, answer: str, finish: str, **fields: Any) -> None:
    whole = ask(text, **fields)
    expect("text", whole.choices[0].message.content, answer)
    expect("role", whole.choices[0].message.role, "assistant")
    expect("finish reason", whole.choices[0].finish_reason, finish)
    chunks = list(ask(text, stream=True, **fields))
    expect("streamed text", join(chunks), answer)
    expect("streamed finish reason", finish_of(chunks), [finish])
    expect("role", chunks[0].choices[0].delta.role, "assistant")
    expect("ids of a stream", len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}), 1)


def models() -> None:
    expect("models", [model.id for model in client.models.list()], [MODEL])
    expect("model", client.models.retrieve(MODEL).id, MODEL)


def text() -> None:
    expect_answer(CASES["text"]["ask"], CASES["text"]["answer"], "stop")


def emoji() -> None:
    expect_answer(CASES["emoji"]["ask"], CASES["emoji"]["answer"], "stop")


def stop() -> None:
    case = CASES["stop"]
    expect_answer(case["ask"], case["answer"], "stop", stop=case["stop"])
    expect_answer(case["ask"], case["answer"], "stop", stop=["absent", case["stop"]])


def length() -> None:
    case = CASES["length"]
    expect_answer(case["ask"], case["answer"], "length", max_tokens=case["max_tokens"])


def usage() -> None:
    case = CASES["usage"]
    counts = {key: case[key] for key in ("prompt_tokens", "completion_tokens")}
    counts["total_tokens"] = sum(counts.values())
    whole = ask(case["ask"]).usage.model_dump()
    expect("usage", {key: whole[key] for key in counts}, counts)
    options = {"stream_options": {"include_usage": True}}
    last = list(ask(case["ask"], stream=True, extra_body=options))[-1]
    expect("choices beside the usage", last.choices, [])
    # Versions before 1.26 read it as a plain mapping.
    streamed = last.usage if isinstance(last.usage, dict) else last.usage.model_dump()
    expect("streamed usage", {key: streamed[key] for key in counts}, counts)


def choices() -> None:
    case = CASES["choices"]
    whole = ask(case["ask"], n=2)
    answers = [(choice.index, choice.message.content, choice.finish_reason) for choice in whole.choices]
    expect("choices", answers, [(0, case["answer"], "stop"), (1, case["answer"], "stop")])
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in ask(case["ask"], n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    expect("streamed choices", texts, {0: case["answer"], 1: case["answer"]})
    expect("streamed finish reasons", reasons, {0: "stop", 1: "stop"})


def logprobs() -> None:
    case = CASES["logprobs"]
    fields = {"logprobs": True, "top_logprobs": case["top"]}
    expect_logprobs(ask(case["ask"], **fields).choices[0].logprobs.content)
    entries = []
    for chunk in ask(case["ask"], stream=True, **fields):
        if chunk.choices and chunk.choices[0].logprobs:
            entries += chunk.choices[0].logprobs.content or []
    expect_logprobs(entries)


def expect_logprobs(entries: list[Any]) -> None:
    case = CASES["logprobs"]
    expect("tokens", len(entries), case["num_tokens"])
    expect("bytes", bytes(byte for entry in entries for byte in entry.bytes).decode(), case["answer"])
    for entry in entries:
        expect_that("a log-probability", -1e-3 < entry.logprob <= 0, entry.logprob)
        expect("alternatives", len(entry.top_logprobs), case["top"])
        expect("the likeliest", entry.top_logprobs[0].bytes, entry.bytes)


def completions() -> None:
    case = CASES["completions"]
    prompt, answer = case["prompt"], case["answer"]
    fields = {"model": MODEL, "max_tokens": case["max_tokens"]}
    whole = client.completions.create(prompt=[prompt, prompt], **fields)
    expect(
        "texts",
        [(c.index, c.text, c.finish_reason) for c in whole.choices],
        [
            (0, answer, "stop"),
            (1, answer, "stop"),
        ],
    )
    chunks = list(client.completions.create(prompt=prompt, stream=True, **fields))
    expect("streamed text", "".join(c.choices[0].text for c in chunks if c.choices), answer)
    echoed = client.completions.create(prompt=prompt, echo=True, logprobs=1, **fields).choices[0]
    expect("echo", echoed.text, prompt + answer)
    probs: Any = echoed.logprobs
    expect("tokens", "".join(probs.tokens), prompt + answer)
    expect("first log-probability", probs.token_logprobs[0], None)
    expect_that("log-probabilities of the rest", all(p <= 0 for p in probs.token_logprobs[1:]))
    expect("offsets", probs.text_offset, list(range(len(prompt + answer))))
    expect("alternatives", [len(top) for top in probs.top_logprobs[len(prompt) :]], [1] * len(answer))


def calls_of(message: Any) -> list[tuple[str, Any]]:
    calls = message.tool_calls or []
    expect("distinct ids", len({call.id for call in calls}), len(calls))
    expect("types", {call.type for call in calls} | {"function"}, {"function"})
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def collect_calls(chunks: Iterable[Any]) -> list[tuple[str, Any]]:
    """As the documentation tells to: by index, id and name once, then pieces of the arguments."""
    ids, names, arguments = {}, {}, {}
    for chunk in chunks:
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            if call.id is not None:
                expect_that("one id for each call", call.index not in ids, call.id)
                ids[call.index], names[call.index] = call.id, call.function.name
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    expect("indexes", sorted(arguments), sorted(ids))
    return [(names[i], json.loads(arguments[i])) for i in sorted(ids)]


def tools() -> None:
    case = CASES["tools"]
    wanted = [[case["name"], case["arguments"]]]
    whole = ask(case["ask"], tools=TOOLS).choices[0]
    expect_calls(calls_of(whole.message), wanted)
    expect("text", whole.message.content or "", "")
    expect("finish reason", whole.finish_reason, "tool_calls")
    chunks = list(ask(case["ask"], tools=TOOLS, stream=True))
    expect_calls(collect_calls(chunks), wanted)
    expect("streamed text", join(chunks), "")
    expect("streamed finish reason", finish_of(chunks), ["tool_calls"])


def parallel_tools() -> None:
    case = CASES["parallel_tools"]
    whole = ask(case["ask"], tools=TOOLS).choices[0].message
    expect_calls(calls_of(whole), case["calls"])
    expect("text", (whole.content or "").strip(), case["text"])
    chunks = list(ask(case["ask"], tools=TOOLS, stream=True))
    expect_calls(collect_calls(chunks), case["calls"])
    expect("streamed text", join(chunks), whole.content)
    only_one = {"parallel_tool_calls": False}
    single = ask(case["ask"], tools=TOOLS, extra_body=only_one).choices[0].message
    expect_calls(calls_of(single), case["calls"][:1])


def tool_choice() -> None:
    case = CASES["tool_choice"]
    unforced = ask(case["ask"], tools=TOOLS).choices[0]
    expect("text", unforced.message.content, case["unforced"])
    named = {"type": "function", "function": {"name": case["name"]}}
    for choice in ("required", named):
        forced = ask(case["ask"], tools=TOOLS, tool_choice=choice).choices[0].message
        expect_calls(calls_of(forced), [[case["name"], case["arguments"]]])
        chunks = ask(case["ask"], tools=TOOLS, tool_choice=choice, stream=True)
        expect_calls(collect_calls(chunks), [[case["name"], case["arguments"]]])
    none = ask(CASES["tools"]["ask"], tools=TOOLS, tool_choice="none").choices[0]
    expect_calls(calls_of(none.message), [])
    expect("finish reason", none.finish_reason, "stop")


def tool_result() -> None:
    case = CASES["tool_result"]
    message = ask(case["ask"], tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": case["result"]}
    call = {
        "id": message.tool_calls[0].id,
        "type": "function",
        "function": {
            "name": message.tool_calls[0].function.name,
            "arguments": message.tool_calls[0].function.arguments,
        },
    }
    history: Any = [
        user(case["ask"]),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        result,
    ]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    expect("text", answer.choices[0].message.content, case["answer"])


def json_mode() -> None:
    case = CASES["json_mode"]
    answer = ask(case["ask"], response_format={"type": "json_object"}).choices[0]
    expect("object", json.loads(answer.message.content), case["answer"])


def structured() -> None:
    case = CASES["structured"]
    person = Person(**case["answer"])
    question: Any = {"model": MODEL, "messages": [user(case["ask"])], "response_format": Person}
    whole = client.chat.completions.parse(**question).choices[0]
    expect("parsed", whole.message.parsed, person)
    expect("finish reason", whole.finish_reason, "stop")
    with client.chat.completions.stream(**question) as stream:
        streamed = stream.get_final_completion().choices[0].message
    expect("parsed from a stream", streamed.parsed, person)


def refusals() -> None:
    case = CASES["refusals"]
    wrong = expect_error(openai.UnprocessableEntityError, lambda: ask("hi", max_tokens=case["max_tokens"]))
    expect("param", wrong.param, "max_tokens")
    expect_that("the field in the message", case["field"] in wrong.message, wrong.message)
    expect_that("a request id", wrong.response.headers.get("x-request-id"))
    too_long = expect_error(openai.BadRequestError, lambda: ask("x" * case["too_long"], stream=True))
    expect_that("the limit", case["message"] in too_long.message, too_long.message)
    expect("code", too_long.code, "context_length_exceeded")
    expect_error(openai.NotFoundError, lambda: client.models.retrieve("other"))
    stranger = client.with_options(api_key="wrong")
    expect_error(openai.AuthenticationError, stranger.models.list)


def fault() -> None:
    case = CASES["fault"]
    expect_error(openai.InternalServerError, lambda: ask(case["ask"]))
    begun: list[Any] = []
    error = expect_error(openai.APIError, lambda: read_into(begun, ask(case["ask"], stream=True)))
    expect("text before the error", join(begun), case["begun"])
    expect("type", error.type, "api_error")


def cancel() -> None:
    stream = ask(CASES["cancel"]["ask"], stream=True, max_tokens=3500)
    next(chunk for chunk in stream if chunk.choices[0].delta.content)
    stream.response.close()
    expect_idle()


def retries() -> None:
    patient = client.with_options(max_retries=2)

    def call(text: str) -> str:
        answer = patient.chat.completions.create(model=MODEL, messages=[user(text)])  # type: ignore[list-item]
        return answer.choices[0].message.content or ""

    expect_retries(call)


run(
    models,
    text,
    emoji,
    stop,
    length,
    usage,
    choices,
    logprobs,
    completions,
    tools,
    parallel_tools,
    tool_choice,
    tool_result,
    json_mode,
    structured,
    refusals,
    fault,
    cancel,
    retries,
)
