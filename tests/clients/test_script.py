from __future__ import annotations

import json

import pytest

from clients.script import END, Plan, plan_answer, rank_tokens, read_context
from fakes import EOS

CALL = b'<tool_call>\n{"name": "add", "arguments": {"x": [1]}}\n</tool_call>'


def speak(plan: Plan, allowed: bytes | None = None) -> bytes:
    """What the plan comes to; ``allowed`` is the only text that a grammar lets through."""
    said = b""
    while True:
        ranked = rank_tokens(plan, said)
        if allowed is not None:
            ranked = [token for token in ranked if token == (allowed + b"\0")[len(said)]]
            if len(said) == len(allowed):
                return said
        if ranked[0] == EOS:
            return said
        said += bytes([ranked[0]])


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (b"say: two\n lines", b" two\n lines"),
        (b'call:add {"x": [1]}', CALL),
        (b'calls:Both.\ncall:add {"x": [1]}\ncall:add {"x": [1]}', b"Both.\n" + CALL + b"\n" + CALL),
        (b"slow:30", b"abcdefghijklmnopqrstuvwxyzabcd"),
        (b"retry:17", b"done"),
        (b"unless forced:say:x", b"No."),
        (b"something else", b""),
    ],
)
def test_the_last_message_says_the_answer(ask: bytes, answer: bytes) -> None:
    assert speak(plan_answer(b"<system>call:<user>say:old<assistant>old<user>" + ask)) == answer


def test_a_text_without_roles_is_a_message() -> None:
    assert speak(plan_answer(b"say:raw")) == b"raw"


def test_the_answer_goes_on_where_it_was_begun() -> None:
    plan, said = read_context(b"<user>say:Hello" + END + b"Hel")
    assert rank_tokens(plan, said)[0] == ord("l")


def test_marks_are_repeated_from_calls_and_results_but_not_from_the_question() -> None:
    history = b"<user>call:f ##1##" + END + b"<tool_call>##2##</tool_call><tool>is ##3##."
    assert speak(plan_answer(history)) == b"2 3"


def test_a_task_that_fails_says_the_letters_before_it() -> None:
    plan = plan_answer(b"<user>fault:3")
    assert (plan.text, plan.fault_after) == (b"abc", 3)


@pytest.mark.parametrize("form", ['{"a":[1,2]}', '{ "a" : [ 1, 2 ] }', '{\n "a": [1,\n2]}'])
def test_what_a_grammar_forces_is_said_in_the_white_space_it_wants(form: str) -> None:
    plan = plan_answer(b'<user>unless forced:say:{"a": [1, 2]}')
    assert json.loads(speak(plan, form.encode())) == {"a": [1, 2]}
