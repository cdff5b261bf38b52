"""Typed reading of metadata."""

from __future__ import annotations

from typing import Any

import pytest

from astrai_triton.checkpoint.fields import Fields
from astrai_triton.errors import CorruptFileError

FIELDS = Fields(
    {"p.one": 1, "p.half": 0.5, "p.word": "x", "p.yes": True, "p.null": None, "p.list": [1]}, "file", "p."
)


def test_values_of_the_right_type_are_given() -> None:
    assert FIELDS.integer("one") == 1
    assert FIELDS.number("half") == 0.5
    assert isinstance(FIELDS.number("one"), float)
    assert FIELDS.text("word") == "x"
    assert FIELDS.flag("yes") is True
    assert FIELDS.sequence("list") == [1]


def test_a_whole_float_is_an_integer() -> None:
    assert Fields({"x": 8192.0}, "file").integer("x") == 8192


@pytest.mark.parametrize("key", ["null", "absent"])
def test_null_and_absent_give_the_default(key: str) -> None:
    assert not FIELDS.has(key)
    assert FIELDS.integer(key, 7) == 7
    assert FIELDS.optional_number(key) is None
    assert FIELDS.sequence(key) is None
    assert FIELDS.section(key) is None
    with pytest.raises(CorruptFileError, match=f"^file: the required key 'p.{key}' is missing"):
        FIELDS.integer(key)


@pytest.mark.parametrize(
    ("getter", "key"),
    [
        ("integer", "half"),
        ("integer", "yes"),
        ("integer", "word"),
        ("number", "yes"),
        ("number", "word"),
        ("flag", "one"),
        ("text", "one"),
        ("sequence", "word"),
        ("section", "list"),
    ],
)
def test_a_value_of_another_type_is_named_with_what_was_wanted(getter: str, key: str) -> None:
    get: Any = getattr(FIELDS, getter)
    with pytest.raises(CorruptFileError, match=rf"^file: key 'p\.{key}': wanted .*, got "):
        get(key)


def test_a_section_names_itself_in_errors() -> None:
    section = Fields({"rope": {"factor": "x"}}, "config.json").section("rope")
    assert section is not None
    with pytest.raises(
        CorruptFileError, match=r"^config\.json: rope: key 'factor': wanted a number, got 'x'"
    ):
        section.number("factor")
