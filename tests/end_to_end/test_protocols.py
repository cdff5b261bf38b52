"""Choices, log-probabilities, forms and tools of SmolLM2, through the official clients."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from server_process import Server

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

MESSAGES: Any = [{"role": "user", "content": "What colour is the sky? Answer in one word."}]
ROUNDING = 1e-3
"""Of float32 logits up to 31 in size, after prefills in other chunks."""


class Sky(pydantic.BaseModel):
    colour: Literal["blue", "green", "red"]
    cloudy: bool


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ASK_WEATHER: Any = [{"role": "user", "content": "How warm is it in Paris? Use the tool."}]


@pytest.fixture
def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def anthropic_client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(**({"model": "astrai", "prompt": prompt, "temperature": 0} | fields))


def test_a_prompt_is_scored_as_its_text_is_when_it_is_sampled(openai_client: openai.OpenAI) -> None:
    prompt = "The quick brown fox jumps over the lazy"
    said = complete(openai_client, prompt, max_tokens=8, logprobs=3).choices[0]
    assert "".join(said.logprobs.tokens) == said.text
    scored = complete(openai_client, prompt + said.text, max_tokens=0, echo=True, logprobs=3).choices[0]
    assert scored.text == "".join(scored.logprobs.tokens) == prompt + said.text
    assert scored.logprobs.token_logprobs[0] is None
    starts = scored.logprobs.text_offset
    named = zip(starts, scored.logprobs.tokens, strict=True)
    assert all(scored.text[start:].startswith(token) for start, token in named)
    assert starts == sorted(starts)
    assert scored.logprobs.tokens[-8:] == said.logprobs.tokens
    assert scored.logprobs.token_logprobs[-8:] == pytest.approx(said.logprobs.token_logprobs, abs=ROUNDING)
    for top, logprob in zip(
        scored.logprobs.top_logprobs[-8:], scored.logprobs.token_logprobs[-8:], strict=True
    ):
        assert max(top.values()) == logprob


def test_a_stream_of_characters_of_several_tokens_joined_is_the_whole(openai_client: openai.OpenAI) -> None:
    prompt = "I say: 🦊🐻🦊🐻🦊🐻🦊🐻🦊"
    fields = {"max_tokens": 12, "echo": True, "logprobs": 0}
    whole = complete(openai_client, prompt, **fields).choices[0]
    text, tokens = "", []
    for chunk in complete(openai_client, prompt, stream=True, **fields):
        text += chunk.choices[0].text
        tokens += chunk.choices[0].logprobs.tokens if chunk.choices[0].logprobs else []
    assert text == whole.text
    assert tokens == whole.logprobs.tokens
    assert whole.text.startswith(prompt)
    assert any(token.startswith("bytes:") for token in tokens)


def test_choices_are_those_of_their_seeds(openai_client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "astrai", "messages": MESSAGES, "max_tokens": 12, "temperature": 1.2}
    create = openai_client.chat.completions.create
    together = create(**fields, seed=5, n=3, logprobs=True).choices
    alone = [create(**fields, seed=5 + j).choices[0].message.content for j in range(3)]
    assert [choice.message.content for choice in together] == alone
    for choice in together:
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == choice.message.content


def test_an_answer_has_the_form_that_is_asked_for(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    parsed = openai_client.chat.completions.parse(
        model="astrai", messages=MESSAGES, response_format=Sky, max_tokens=200, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Sky)
    message = anthropic_client.messages.parse(
        model="astrai", messages=MESSAGES, output_format=Sky, max_tokens=200, extra_body={"temperature": 0}
    )
    assert message.parsed_output == parsed.choices[0].message.parsed


def check_weather(arguments: Any) -> None:
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("C", "F")
    assert len(arguments["city"]) <= 20


def test_a_tool_that_must_be_called_is(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    function = {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": WEATHER,
        "strict": True,
    }
    completion = openai_client.chat.completions.create(
        model="astrai",
        messages=ASK_WEATHER,
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
    )
    (call,) = completion.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, completion.choices[0].finish_reason) == ("get_weather", "tool_calls")
    check_weather(json.loads(call.function.arguments))
    body: Any = {
        "model": "astrai",
        "messages": ASK_WEATHER,
        "tools": [{"name": "get_weather", "description": "Tells the weather.", "input_schema": WEATHER}],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }
    counted = anthropic_client.messages.count_tokens(**body)
    with anthropic_client.messages.stream(max_tokens=200, extra_body={"temperature": 0}, **body) as stream:
        final = stream.get_final_message()
    (block,) = final.content
    assert block.type == "tool_use"
    check_weather(block.input)
    assert final.stop_reason == "tool_use"
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == counted.input_tokens
