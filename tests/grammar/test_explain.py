from __future__ import annotations

import pytest

from astrai_triton.grammar.explain import explain_failure

LISTING = '\n   1 | start: %json {"secret": 1}\n     |        ^\n'


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            f"at 1(8): failed to compile JSON schema: Unsatisfiable schema: required property 'a'{LISTING}",
            "no JSON satisfies the schema: required property 'a'",
        ),
        (
            f"at 1(8): failed to compile JSON schema: schema too large{LISTING}",
            "too complex: schema too large",
        ),
        ("lexer error: too many states: 9 >= 9\n<non-verbose/>", "too complex: too many states: 9 >= 9"),
        ("Parser Error: Current row has 9 items; max is 8", "too complex: Current row has 9 items; max is 8"),
        (
            "NoExtensionBias\n<non-verbose/>",
            "no text satisfies the grammar, or none that this model's tokens can write",
        ),
        (
            "panic: index out of bounds\n<backtrace>\n0: frame",
            "the grammar engine failed on this grammar; simplify it",
        ),
        (f"at 3(1): unknown name: b{LISTING}", "line 3: unknown name: b"),
    ],
)
def test_a_failure_is_told_in_one_line_without_the_grammar(message: str, cause: str) -> None:
    assert explain_failure(message) == cause


def test_a_long_cause_is_cut() -> None:
    assert len(explain_failure("x" * 1000)) == 300
