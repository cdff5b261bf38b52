"""Conversations with tools become prompts, with templates that know tools and with those that do not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from astrai_server.answer import CallArguments, CallStart, Piece
from astrai_server.conversation import Call, Tool, ToolChoice, Turn, encode_conversation
from astrai_server.tools.parser import ToolCallParser
from astrai_server.wire import InvalidRequestError
from astrai_triton.engine import InferenceEngine
from astrai_triton.errors import ChatTemplateError
from astrai_triton.tokenizer.chat import ChatTemplate, normalize_messages

# Joins strings, as SmolLM2's does.
PLAIN = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As Gemma's and Mistral's: user and assistant in turns, no other role.
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}" + PLAIN
)
TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}"
    "{% for key in ['name', 'tool_call_id'] if m[key] %} {{ m[key] }}{% endfor %}>"
    "{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
    '{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}{{ c.id }}'
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

WEATHER = Tool(
    "weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}}
)
CLOCK = Tool("clock", None, {})
LINES = (
    '{"name": "weather", "description": "Tells the weather.", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}}}\n'
    '{"name": "clock", "parameters": {"type": "object", "properties": {}}}'
)
SYSTEM = Turn("system", "Be brief.")
USER = Turn("user", "Weather?")
ASK = Turn("assistant", "Let me see.", calls=(Call("call_1", "weather", '{"city":  "Paris"}'),))
RESULT = Turn("tool", "Sunny", call_id="call_1")
ASKED = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Paris"}}\n</tool_call>'
ANSWERED = "<tool_response>\nSunny\n</tool_response>"


class Codec:
    """A chat template; its prompts are bytes of text."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source)
        self.renders_tools = self._template.tool_format is not None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        normalized = normalize_messages(messages)
        if continue_final:
            text = self._template.render_continued(normalized, mark="\U0001d300", tools=tools)
        else:
            text = self._template.render(normalized, add_generation_prompt=add_generation_prompt, tools=tools)
        return list(text.encode())


class Engine:
    def __init__(self, source: str) -> None:
        self.tokenizer = Codec(source)


def render(source: str, *turns: Turn, **options: Any) -> str:
    engine = cast(InferenceEngine, Engine(source))
    return bytes(encode_conversation(engine, turns, **options)).decode()


def instructions(prompt: str) -> str:
    """What the model is told of its tools, in a prompt whose first turn tells it."""
    first = prompt.split("<user>")[0].removeprefix("<system>")
    assert first.startswith("You can call functions.")
    return first


# Without tools


@pytest.mark.parametrize("source", [PLAIN, TOOLS])
def test_without_tools_the_template_gets_role_and_text_alone(source: str) -> None:
    turns = (SYSTEM, USER, Turn("assistant", "Sunny."), Turn("user", ""), Turn("user", "Why?"))
    expected = "<system>Be brief.<user>Weather?<assistant>Sunny.<user><user>Why?<assistant>"
    assert render(source, *turns) == expected
    assert render(source, *turns, choice=ToolChoice("none")) == expected


@pytest.mark.parametrize("source", [PLAIN, TOOLS])
def test_an_unfinished_answer_is_continued(source: str) -> None:
    prompt = render(source, USER, Turn("assistant", "It is"), continue_final=True)
    assert prompt == "<user>Weather?<assistant>It is"


def test_the_templates_refusal_is_passed_on() -> None:
    with pytest.raises(ChatTemplateError, match="must alternate"):
        render(STRICT, USER, USER)


def test_text_that_cannot_be_encoded_is_the_clients_mistake() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(PLAIN, Turn("user", "\ud800"))
    assert caught.value.issues[0].path == ("messages",)


# Templates that know tools


def test_a_template_that_knows_tools_gets_them_as_functions() -> None:
    prompt = render(TOOLS, USER, tools=[WEATHER, CLOCK])
    described, decoder, found = prompt.removesuffix("<user>Weather?<assistant>"), json.JSONDecoder(), []
    while described:
        tool, end = decoder.raw_decode(described)
        found.append(tool)
        described = described[end:]
    assert found == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Tells the weather.",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        },
        {
            "type": "function",
            "function": {
                "name": "clock",
                "description": "",
                "parameters": {"type": "object", "properties": {}},
            },
        },
    ]


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("named", "clock"), ToolChoice("auto")])
def test_such_a_template_gets_the_same_whatever_the_choice(choice: ToolChoice) -> None:
    assert render(TOOLS, USER, tools=[CLOCK], choice=choice) == render(TOOLS, USER, tools=[CLOCK])


def test_calls_and_results_are_structured_with_parsed_arguments() -> None:
    prompt = render(TOOLS, USER, ASK, RESULT)
    before, _, after = prompt.partition('<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}')
    assert before == "<user>Weather?<assistant>Let me see."
    call_id = after[:9]
    assert call_id.isalnum()
    assert after == f"{call_id}<tool weather {call_id}>Sunny<assistant>"


def test_results_carry_the_name_they_came_with_or_none() -> None:
    assert "<tool mine>x" in render(TOOLS, USER, ASK, Turn("tool", "x", name="mine"))
    assert "<tool>x" in render(TOOLS, USER, ASK, Turn("tool", "x"))


def test_ids_of_calls_differ_even_where_none_were_given() -> None:
    calls = (Call(None, "clock", "{}"), Call(None, "clock", ""), Call("1", "clock", "{}"))
    ids = [part[:9] for part in render(TOOLS, Turn("assistant", "", calls=calls[:2])).split("{}}")[1:]]
    assert len(set(ids)) == 2


def test_a_template_that_takes_one_call_only_refuses_more() -> None:
    source = (
        "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}"
    )
    calls = (Call("1", "clock", "{}"), Call("2", "clock", "{}"))
    with pytest.raises(ChatTemplateError, match="one"):
        render(source + "{% endfor %}" + TOOLS, USER, Turn("assistant", "", calls=calls))


def test_tools_that_may_not_be_called_are_not_shown_but_earlier_calls_are() -> None:
    prompt = render(TOOLS, USER, ASK, RESULT, USER, tools=[WEATHER], choice=ToolChoice("none"))
    assert prompt == render(TOOLS, USER, ASK, RESULT, USER)
    assert "Tells" not in prompt
    prompt = render(PLAIN, USER, ASK, RESULT, tools=[WEATHER], choice=ToolChoice("none"))
    assert prompt == f"<user>Weather?<assistant>Let me see.\n{ASKED}<user>{ANSWERED}<assistant>"


# Templates that do not


def test_tools_stand_in_the_system_prompt_before_what_is_there() -> None:
    with_system = render(PLAIN, SYSTEM, USER, tools=[WEATHER, CLOCK])
    told = instructions(with_system)
    assert f"<tools>\n{LINES}\n</tools>" in told
    assert told.endswith("\n\nBe brief.")
    assert with_system.endswith("<user>Weather?<assistant>")
    without = render(PLAIN, USER, tools=[WEATHER, CLOCK])
    assert with_system == without.replace("<user>", "\n\nBe brief.<user>")


def test_what_is_told_has_an_example_that_the_parser_reads() -> None:
    told = instructions(render(PLAIN, USER, tools=[CLOCK]))
    parser = ToolCallParser(["the function's name"], tool_format="hermes", new_id=lambda: "id")
    pieces: list[Piece] = [
        piece for piece in parser.push(told) if isinstance(piece, (CallStart, CallArguments))
    ]
    assert pieces == [
        CallStart(0, "id", "the function's name"),
        CallArguments(0, '{"an argument": "its value"}'),
    ]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (None, "Call a function only where the answer needs one"),
        (ToolChoice("auto"), "Call a function only where the answer needs one"),
        (ToolChoice("required"), "must call a function"),
        (ToolChoice("named", "clock"), "must call the function clock"),
        (ToolChoice("auto", is_parallel=True), "several functions"),
        (ToolChoice("auto", is_parallel=False), "at most one function"),
    ],
)
def test_the_choice_is_told_after_the_list(choice: ToolChoice | None, words: str) -> None:
    told = instructions(render(PLAIN, USER, tools=[WEATHER, CLOCK], choice=choice))
    assert words in told.partition("</tools>")[2]
    assert (
        told.partition("</tools>")[0]
        == instructions(render(PLAIN, USER, tools=[WEATHER, CLOCK])).partition("</tools>")[0]
    )


def test_a_template_without_a_system_prompt_gets_the_tools_from_the_user() -> None:
    prompt = render(STRICT, USER, ASK, RESULT, tools=[WEATHER])
    assert prompt.startswith("<user>You can call functions.")
    assert prompt.endswith(f"\n\nWeather?<assistant>Let me see.\n{ASKED}<user>{ANSWERED}<assistant>")


def test_a_system_prompt_of_the_client_is_refused_by_such_a_template_as_ever() -> None:
    with pytest.raises(ChatTemplateError, match="must alternate"):
        render(STRICT, SYSTEM, USER, tools=[WEATHER])


def test_results_become_one_user_turn_with_what_the_user_says_next() -> None:
    turns = (USER, ASK, RESULT, Turn("tool", "12:00"), Turn("user", "And now?"), Turn("assistant", "Noon."))
    expected = (
        f"<user>Weather?<assistant>Let me see.\n{ASKED}"
        f"<user>{ANSWERED}\n<tool_response>\n12:00\n</tool_response>\nAnd now?<assistant>Noon."
    )
    assert render(PLAIN, *turns) == f"{expected}<assistant>"
    assert render(STRICT, *turns, USER) == f"{expected}<user>Weather?<assistant>"


def test_a_user_turn_after_another_is_merged_with_results_only() -> None:
    assert render(PLAIN, USER, USER) == "<user>Weather?<user>Weather?<assistant>"
    assert render(PLAIN, RESULT, USER, USER) == f"<user>{ANSWERED}\nWeather?<user>Weather?<assistant>"


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"a":1,  "b": 1e5}', '{"a":1,  "b": 1e5}'),
        (' {"a": 123456789012345678901234567890}\n', '{"a": 123456789012345678901234567890}'),
        ("", "{}"),
        ("  ", "{}"),
        ("broken", '"broken"'),
        ('{"a": 1', '"{\\"a\\": 1"'),
        ('{"a": 1} x', '"{\\"a\\": 1} x"'),
        ("[1]", '"[1]"'),
        ("{" * 100, json.dumps("{" * 100)),
    ],
)
def test_arguments_are_written_to_the_letter_if_they_are_an_object(arguments: str, written: str) -> None:
    turn = Turn("assistant", "", calls=(Call("1", 'a "b"', arguments),))
    expected = f'<tool_call>\n{{"name": "a \\"b\\"", "arguments": {written}}}\n</tool_call>'
    assert render(PLAIN, USER, turn) == f"<user>Weather?<assistant>{expected}<assistant>"


def test_what_the_model_wrote_comes_back_to_it_letter_by_letter() -> None:
    written = f"Let me see.\n{ASKED}\n" + ASKED.replace("Paris", "Rome")
    parser = ToolCallParser(["weather"], tool_format="auto", new_id=lambda: "id")
    pieces = [*parser.push(written), *parser.flush()]
    calls = tuple(Call("id", "weather", piece.text) for piece in pieces if isinstance(piece, CallArguments))
    assert render(PLAIN, USER, Turn("assistant", "Let me see.", calls=calls)) == (
        f"<user>Weather?<assistant>{written}<assistant>"
    )


def test_braces_in_tools_and_names_are_text() -> None:
    tool = Tool("look", "{0} {name} {{x}}", {"type": "object", "properties": {"{tools}": {}}})
    told = instructions(render(PLAIN, USER, tools=[tool], choice=ToolChoice("named", "look")))
    assert '"description": "{0} {name} {{x}}"' in told
    assert '"{tools}": {}' in told
