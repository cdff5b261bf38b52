from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from astrai_triton.errors import GrammarError
from astrai_triton.grammar.patterns import translate_pattern

Accepts = Callable[[Any, str], bool]

# Python reads these as ECMA-262 does, but for the $ before a last line break.
SAME_AS_PYTHON = (
    *("a", "", "^a|b$", "^(a|b$)", "^(?:a|b){2}$", "^a*?$", "^a{0}b?$", "^.$", r"^\d+$", r"^\w\W$", "^[^a]$"),
    *(r"^[\w-]$", r"^[a\]\-]$", "^[-a]$", r"^\/$", r"^\x61\u0062$", "^a{2,}$", "^a{1,2}?$", "(^a|^b)1"),
    *("(a$|b$)", r"^[\d\s]+$", r"^\s$", r"^\S$", "^[a-b1]+$", "^(?<x>a)b$", "x*$", r"^\.$", "^[.]$"),
)


@pytest.mark.parametrize("pattern", SAME_AS_PYTHON)
def test_a_pattern_finds_what_it_finds_elsewhere(accepts: Accepts, pattern: str) -> None:
    reference = re.compile(re.sub(r"(?<!\\)\$", r"\\Z", pattern).replace("(?<x>", "(?P<x>"), re.ASCII)
    schema = {"type": "string", "pattern": pattern}
    for length in range(4):
        for letters in itertools.product("ab1-\n", repeat=length):
            text = "".join(letters)
            assert accepts(schema, json.dumps(text)) == bool(reference.search(text)), text


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("^[[a]$", "[a", "b]"),
        ("^[a&&b]$", "a&b", "c"),
        ("^[+--]$", "+,-", "*."),
        ("^[a~~b]$", "a~b", "c"),
        (r"^[\w-z]$", "a-z_", "!"),
        ("^.$", "a\t", "\n\r\u2028"),
        (r"^\cJ$", "\n", "J"),
        (r"^\t\v?$", "\t", "v"),
        (r"^[\b]$", "\b", "b"),
        (r"^\uD83D\uDE00$", "😀", "x"),
        (r"^\u{1F600}$", "😀", "u"),
        (r"^\p{Lu}$", "AÉ", "a1"),
        (r"^\s$", " \t\u00a0\u3000", "\u0085\ufeffa"),
        (r"^\S$", "aé", " \u00a0\u0085\ufeff"),
        (r"^[^\s]$", "aé", " \u00a0\u0085\ufeff"),
        ("^{$", "{", "a"),
        ("^a{b}]$", (), "a"),
        ("^#$", "#", " "),
    ],
)
def test_a_pattern_is_read_as_ecma_does(
    accepts: Accepts, pattern: str, matching: str | tuple[str, ...], others: str
) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert [char for char in matching if not accepts(schema, json.dumps(char, ensure_ascii=False))] == []
    assert [char for char in others if accepts(schema, json.dumps(char, ensure_ascii=False))] == []


def test_braces_that_count_nothing_are_themselves(accepts: Accepts) -> None:
    assert accepts({"type": "string", "pattern": "^a{b}]$"}, '"a{b}]"')


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)", "look-around"),
        ("(?<!a)", "look-around"),
        (r"(a)\1", "back references"),
        (r"\k<x>", "back references"),
        (r"\bx", "word boundaries"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("*a", "nothing to repeat"),
        ("a**", "nothing to repeat"),
        ("a|+", "nothing to repeat"),
        ("(", "unbalanced"),
        (")", "unbalanced"),
        ("[a", "unclosed class"),
        ("[]", "empty class"),
        ("[^]", "empty class"),
        ("[b-a]", "the wrong way round"),
        ("a{2,1}", "the wrong way round"),
        ("a{,2}", "write {0,n}"),
        (r"\Z", "unknown escape"),
        (r"\01", "unknown escape"),
        ("a\\", "ends in a backslash"),
        (r"\uD800", "no such character"),
        ("a" * 5000, "5000 characters"),
    ],
)
def test_a_pattern_is_refused_with_a_reason(pattern: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        translate_pattern(pattern, "schema/pattern")


def test_anchors_in_the_middle_are_refused(accepts: Accepts) -> None:
    with pytest.raises(GrammarError, match="only where the text begins and ends"):
        accepts({"type": "string", "pattern": "a^b"}, "")
