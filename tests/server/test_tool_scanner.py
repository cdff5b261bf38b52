"""JSON in pieces: at every moment what is settled can be closed to valid JSON."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_server.tools import scanner as scanner_module
from astrai_server.tools.scanner import MAX_DEPTH, JsonScanner, StringReader

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
JSON_TEXTS = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    JSON_VALUES,
    st.booleans(),
    st.sampled_from([None, 1]),
)
BROKEN_TEXTS = st.lists(
    st.sampled_from(
        [
            *'{}[]",:\\/ \n\t\x01aeu-0.+',
            *("12", "1.5", "1e5", "true", "false", "null", "tr"),
            *('"a":', '"b"', "\\u00e9", "\\ud83d", "\\ude00", "😀"),
        ]
    ),
    max_size=14,
).map("".join)


def follow(text: str, cuts: tuple[int, ...] = (), **options: Any) -> tuple[JsonScanner, str, int]:
    """Scan ``text`` cut at ``cuts``; what was settled, and how far it was read."""
    scanner, settled, read = JsonScanner(**options), "", 0
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for begin, end in pairwise(edges):
        if begin < end and read == begin:
            read = begin + scanner.feed(text[begin:end], 0, end - begin)
            settled += scanner.take()
    return scanner, settled, read


def read_string(text: str, cuts: tuple[int, ...] = ()) -> str:
    reader, decoded = StringReader(), ""
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for begin, end in pairwise(edges):
        reader.feed(text, begin, end)
        decoded += reader.take()
    assert reader.is_complete
    return decoded


@given(text=JSON_TEXTS)
def test_valid_json_is_settled_verbatim(text: str) -> None:
    # A number alone ends with the next character only.
    scanner, settled, read = follow(text + "\n")
    assert scanner.is_complete
    assert settled == text
    assert read == len(text)


@given(text=JSON_TEXTS | BROKEN_TEXTS, cuts=st.tuples(st.integers(0), st.integers(0), st.integers(0)))
def test_the_outcome_does_not_depend_on_the_pieces(text: str, cuts: tuple[int, ...]) -> None:
    whole, settled, read = follow(text)
    for pieces in (cuts, tuple(range(len(text)))):
        scanner, other_settled, other_read = follow(text, pieces)
        assert (other_settled, other_read, scanner.close()) == (settled, read, whole.close())
        assert (scanner.is_complete, scanner.is_broken) == (whole.is_complete, whole.is_broken)


@given(
    text=JSON_TEXTS | BROKEN_TEXTS | st.builds(lambda a, b: a[: len(a) // 2] + b, JSON_TEXTS, BROKEN_TEXTS)
)
def test_what_is_settled_can_be_closed_after_every_character(text: str) -> None:
    scanner, settled = JsonScanner(), ""
    for i in range(len(text)):
        if scanner.is_complete or scanner.is_broken:
            break
        scanner.feed(text, i, i + 1)
        settled += scanner.take()
        assert scanner.has_begun == bool(settled)
        if settled:
            json.loads(settled + scanner.close())


@given(text=BROKEN_TEXTS)
def test_only_json_is_complete_and_it_ends_where_python_ends_it(text: str) -> None:
    scanner, _, read = follow(text + " ")
    try:
        # Not strict: control characters in strings are repaired.
        _, end = json.JSONDecoder(strict=False).raw_decode(text.lstrip(" \t\n\r"))
    except ValueError:
        assert not scanner.is_complete
    else:
        # Python takes the longest number that begins there: 0 of 012, 1 of 1.x
        if not scanner.is_broken:
            assert scanner.is_complete
            assert read == len(text) - len(text.lstrip(" \t\n\r")) + end


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ('{"a": 1', "{}"),
        ('{"a": 1,', '{"a": 1}'),
        ('{"a": 1, ', '{"a": 1}'),
        ('{"a": 1, "b', '{"a": 1}'),
        ('{"a": 1, "b"', '{"a": 1}'),
        ('{"a": 1, "b": ', '{"a": 1}'),
        ('{"a": 1, "b": tru', '{"a": 1}'),
        ('{"a": 1, "b": true', '{"a": 1}'),
        ('{"a": "x', '{"a": "x"}'),
        ('{"a": "x\\', '{"a": "x"}'),
        ('{"a": "x\\u00', '{"a": "x"}'),
        ('{"a": "x\\ud83d', '{"a": "x"}'),
        ('{"a": "x\\ud83d\\ude', '{"a": "x"}'),
        ('{"a": "x\\ud83d\\ude00', '{"a": "x\\ud83d\\ude00"}'),
        ('{"a": "x\\ud83dy', '{"a": "x\\ud83dy"}'),
        ('{"a": [1, {"b": [', '{"a": [1, {"b": []}]}'),
        ('{"a": [1, 2', '{"a": [1]}'),
        ('{"a": "x"', '{"a": "x"}'),
        ("{", "{}"),
        ('{"a": tru}', "{}"),
        ('{"a": 01}', "{}"),
        ('{"a": "b", c', '{"a": "b"}'),
        ('{"a": "b\\x', '{"a": "b"}'),
        ('{"a": [1, 2}', '{"a": [1, 2]}'),
    ],
)
def test_a_text_that_breaks_off_is_closed_at_the_last_good_place(text: str, closed: str) -> None:
    scanner, settled, _ = follow(text)
    assert settled + scanner.close() == closed


def test_control_characters_in_strings_become_escapes() -> None:
    scanner, settled, _ = follow('{"a\tb": "x\ny\x01"}')
    assert scanner.is_complete
    assert settled == '{"a\\tb": "x\\ny\\u0001"}'


@pytest.mark.parametrize("text", ["[1]", '"x"', "1", "null", "x", "}"])
def test_only_an_object_passes_where_one_is_wanted(text: str) -> None:
    scanner, settled, read = follow(f" {text}", is_object=True)
    assert scanner.is_broken
    assert (settled, read, scanner.close()) == ("", 1, "")


def test_nesting_is_bounded() -> None:
    scanner, settled, read = follow("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert scanner.is_complete
    scanner, settled, read = follow("[" * (MAX_DEPTH + 1))
    assert scanner.is_broken
    assert read == MAX_DEPTH
    json.loads(settled + scanner.close())


@pytest.mark.parametrize("text", ['{"a": 1' + "0" * 50, '{"' + "k" * 50, '{"a": 1, ' + " " * 50])
def test_what_is_held_back_is_bounded(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner_module, "MAX_HELD", 20)
    whole = follow(text)
    assert whole[0].is_broken
    assert whole[1:] == follow(text, tuple(range(len(text))))[1:]
    json.loads(whole[1] + whole[0].close())


@given(value=st.text(), ascii_only=st.booleans(), cuts=st.tuples(st.integers(0), st.integers(0)))
def test_a_string_is_decoded_whatever_the_pieces(value: str, ascii_only: bool, cuts: tuple[int, ...]) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert read_string(text, cuts) == value
    assert read_string(text, tuple(range(len(text)))) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"\\ud83d"', "\ufffd"),
        ('"\\ude00\\ud83d"', "\ufffd\ufffd"),
        ('"\\ud83d\\ud83d\\ude00"', "\ufffd😀"),
        ('"\\ud83dx"', "\ufffdx"),
        ('"a\nb"', "a\nb"),
        ('""', ""),
    ],
)
def test_a_strings_odd_characters_decode_to_whole_ones(text: str, value: str) -> None:
    assert read_string(text) == value
    assert read_string(text, tuple(range(len(text)))) == value
