"""Chat templates: what they get, what they may not do, what they refuse."""

from __future__ import annotations

import copy
import datetime
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models

from astrai_triton.errors import ChatTemplateError
from astrai_triton.tokenizer import chat
from astrai_triton.tokenizer.chat import ChatTemplate, normalize_messages

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": " Hello  "}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <b> & 'x'", "parameters": {}}}]

# Written like the templates of the families that are served.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{% for message in messages %}
    {% if message['role'] == 'assistant' %}
        {% set role = 'model' %}
    {% else %}
        {% set role = message['role'] %}
    {% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<start_of_turn>model\\n' }}
{% endif %}
"""
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if not message.content and message.role == 'user' %}{% continue %}{% endif %}
    {%- generation %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endgeneration %}
    {%- if loop.index0 > 10 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "qwen": QWEN}


def reference(source: str) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.BPE()),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=source,
    )


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages or (USER,), **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_transformers_renders_them(
    name: str, add_generation_prompt: bool, tools: list[Any] | None
) -> None:
    messages = [USER, ANSWER, {"role": "user", "content": "  naïve <b>\n\n"}]
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    expected = reference(TEMPLATES[name]).apply_chat_template(messages, tokenize=False, **options)
    assert render(TEMPLATES[name], *messages, **options) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["One, two,", "One ", "  One\n", "Hi"])
def test_a_last_message_is_continued_as_transformers_continues_it(name: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    expected = reference(TEMPLATES[name]).apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    template = ChatTemplate(TEMPLATES[name], special_tokens={"bos_token": "<s>"})
    assert template.render_continued(messages, mark="\U0001d300") == expected


def test_an_empty_last_message_is_continued_from_its_opening() -> None:
    text = ChatTemplate(CHATML).render_continued([USER, {"role": "assistant", "content": ""}], mark="\ufdd0")
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("messages", [[], [USER], [ANSWER, USER], [{"role": "assistant", "content": None}]])
def test_only_an_assistant_message_can_be_continued(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ChatTemplateError, match="continue_final"):
        ChatTemplate(CHATML).render_continued(messages, mark="\ufdd0")


def test_a_template_that_cuts_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(ChatTemplateError, match="does not write out the end"):
        ChatTemplate("{{ messages[-1].content[:2] }}").render_continued([USER, ANSWER], mark="\ufdd0")


def test_a_refusal_carries_the_templates_own_words() -> None:
    with pytest.raises(ChatTemplateError, match=r"^System role not supported$"):
        render(GEMMA, {"role": "system", "content": "x"}, USER)


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 1 }}", "{{ messages[7].role }}", "{{ undefined_function() }}", "{{ 1 / 0 }}"],
)
def test_a_template_that_fails_says_so(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render this conversation"):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% endfor %}", "{% generation %}", "{% unknown %}"])
def test_a_template_that_is_not_jinja_is_refused_at_once(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="not valid Jinja"):
        ChatTemplate(source)


def test_a_template_that_is_not_text_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="not text but list"):
        ChatTemplate(["{{ x }}"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['datetime'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ strftime_now.__code__.co_filename }}",
        "{% include 'x' %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ 'x' * 10**10 }}", "{{ 10**10 * [0] }}", "{{ 2 ** 10**9 }}", "{{ range(10**9) | list }}"]
)
def test_one_operation_cannot_exhaust_memory(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_PROMPT_CHARS", 1000)
    assert len(render("{% for i in range(100) %}{{ 'x' * 10 }}{% endfor %}")) == 1000
    with pytest.raises(ChatTemplateError, match="more than 1000 characters"):
        render("{% for i in range(101) %}{{ 'x' * 10 }}{% endfor %}")


def test_strftime_now_gives_the_date() -> None:
    before = datetime.datetime.now().strftime("%Y-%m-%d")
    text = render("{{ strftime_now('%Y-%m-%d') }}")
    assert before <= text <= datetime.datetime.now().strftime("%Y-%m-%d")


def test_tojson_escapes_no_html_and_keeps_unicode() -> None:
    assert render("{{ {'b': '<é&\\'>', 'a': none} | tojson }}") == '{"b": "<é&\'>", "a": null}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'


def test_tojson_escapes_unicode_on_request_but_for_stand_ins() -> None:
    text = render("{{ x | default('é🎉\U0001d300') | tojson(ensure_ascii=true) }}")
    assert text == '"\\u00e9\\ud83c\\udf89\U0001d300"'


def test_tojson_of_nothing_fails() -> None:
    with pytest.raises(ChatTemplateError, match="Undefined"):
        render("{{ messages[0].nothing | tojson }}")


def test_tools_take_their_own_template_where_there_is_one() -> None:
    template = ChatTemplate("plain", tool_source="with tools")
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[]) == "plain"
    assert template.render([USER], tools=TOOLS) == "with tools"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hi", "Hi"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"),
    ],
)
def test_content_becomes_text(content: object, text: str) -> None:
    assert normalize_messages([{"role": "user", "content": content}]) == [{"role": "user", "content": text}]


def test_a_message_without_content_has_empty_content() -> None:
    assert normalize_messages([{"role": "assistant"}]) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ([{"type": "image_url", "image_url": {}}], "image_url"),
        (["x"], "str"),
        ([{"type": "text"}], "text"),
        (3, "int"),
    ],
)
def test_content_that_is_not_text_is_refused_by_name(content: object, name: str) -> None:
    with pytest.raises(ChatTemplateError, match=rf"messages\[1\]\.content.*{name}"):
        normalize_messages([USER, {"role": "user", "content": content}])


@pytest.mark.parametrize("role", ["end", "<|im_end|>", "", None, 3, ["user"]])
def test_an_unknown_role_is_refused_with_the_choices(role: object) -> None:
    with pytest.raises(ChatTemplateError, match=r"messages\[0\]\.role: wanted one of system, "):
        normalize_messages([{"role": role, "content": "x"}])


def test_a_message_that_is_no_mapping_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"messages\[0\]"):
        normalize_messages(["Hi"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ('{"a":', '{"a":'),
        ("[" * 100_000, "[" * 100_000),
        ("1" * 10_000, "1" * 10_000),
    ],
)
def test_call_arguments_become_an_object_if_they_are_one(arguments: object, expected: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = normalize_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"] == [{**call, "function": {"name": "f", "arguments": expected}}]
    assert call["function"]["arguments"] is arguments  # type: ignore[index]


@pytest.mark.parametrize("calls", [None, [], ["x"], [{"id": "1"}]])
def test_odd_tool_calls_are_left_to_the_template(calls: object) -> None:
    (message,) = normalize_messages([{"role": "assistant", "content": "x", "tool_calls": calls}])
    assert message["tool_calls"] == calls


def test_the_messages_given_are_not_changed() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}]},
    ]
    before = copy.deepcopy(messages)
    normalize_messages(messages)
    assert messages == before


# Tools. Each template does what those of one family do.

TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}%CALLS%{% endif %}{{ m.content }}{% endfor %}"
)
SHOWN_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"


def write_template(calls: str, *, tools: str = SHOWN_TOOLS, turns: str = TURNS) -> str:
    return tools + turns.replace("%CALLS%", f"{{% for c in m.tool_calls %}}{calls}{{% endfor %}}")


TAGGED = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>"
)
TAGGED_NAME_LAST = (
    '<tool_call>{"arguments": {{ c.function.arguments | tojson }}, "name": "{{ c.function.name }}"}'
)
PLAIN = '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
LISTED = "[TOOL_CALLS] [{{ c.function | tojson }}]"
ONE_CALL = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}" + PLAIN
SHORT_IDS = "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}" + LISTED
XML = "<tool_call><{{ c.function.name }}>{{ c.function.arguments.values() | join }}</{{ c.function.name }}>"
JOINED = "{{ '<tool_call>' + c.function.arguments }}"


@pytest.mark.parametrize(
    ("calls", "tool_format"),
    [
        (TAGGED, "hermes"),
        (TAGGED_NAME_LAST, "hermes"),
        (PLAIN, "json"),
        (LISTED, "json"),
        (ONE_CALL, "json"),
        (SHORT_IDS, "json"),
        (XML, None),
        (JOINED, None),
        ("", None),
    ],
)
def test_a_template_shows_how_it_writes_calls(calls: str, tool_format: str | None) -> None:
    assert ChatTemplate(write_template(calls)).tool_format == tool_format


@pytest.mark.parametrize("source", TEMPLATES.values())
def test_a_template_that_leaves_out_tools_or_calls_has_no_format(source: str) -> None:
    assert ChatTemplate(source).tool_format is None


@pytest.mark.parametrize(
    "source",
    [
        write_template(TAGGED, tools=""),
        write_template(TAGGED, turns=TURNS.replace("{{ m.content }}", "")),
        write_template(TAGGED, tools="{% if not tools %}{{ raise_exception('no tools') }}{% endif %}"),
        # Shown in the list of tools only.
        write_template("", tools=SHOWN_TOOLS + TAGGED.replace("c.function", "tools[0].function")),
        write_template(TAGGED, turns="{% if tools %}" + TURNS + "{% endif %}"),
        write_template(
            TAGGED,
            turns="{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}"
            "{% endif %}{% endfor %}" + TURNS,
        ),
    ],
)
def test_a_format_needs_tools_calls_and_results_with_and_without_tools(source: str) -> None:
    assert ChatTemplate(source).tool_format is None


def test_a_template_for_tools_alone_has_no_format() -> None:
    # Earlier calls of a conversation that offers no tools would be left out.
    assert ChatTemplate(CHATML, tool_source=write_template(TAGGED)).tool_format is None
    assert ChatTemplate(write_template(TAGGED), tool_source=write_template(PLAIN)).tool_format == "json"


def test_calls_and_results_are_rendered_by_the_template() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "nothing", "name": "look", "tool_call_id": "a1b2c3d4e"},
    ]
    tools = [{"type": "function", "function": TOOL}]
    text = ChatTemplate(write_template(TAGGED)).render(normalize_messages(messages), tools=tools)
    assert text == (
        '{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": '
        '{"type": "object", "properties": {}}}}<user>Hi<assistant><tool_call>\n'
        '{"name": "look", "arguments": {"at": "é"}}\n</tool_call><tool>nothing'
    )
