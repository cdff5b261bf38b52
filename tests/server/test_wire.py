"""Request bodies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_server.field import at_least, between, no_longer_than, not_empty, not_yet, one_of, stop_strings
from astrai_server.sse import encode_json
from astrai_server.wire import (
    MAX_DEPTH,
    MAX_ISSUES,
    InvalidRequestError,
    Issue,
    MalformedBodyError,
    describe_value,
    parse_json,
    read_request,
)


@attrs.frozen(kw_only=True)
class Leaf:
    kind: str = attrs.field(validator=one_of("text"))
    size: int = 1

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"silent"})


@attrs.frozen(kw_only=True)
class Tree:
    name: str
    ratio: float = attrs.field(default=0.5, validator=between(0, 1))
    count: int = attrs.field(default=3, validator=at_least(0))
    is_on: bool = False
    leaves: str | tuple[Leaf, ...] | None = None
    words: tuple[str, ...] = attrs.field(default=("a",), validator=[not_empty, no_longer_than(3)])
    weights: Mapping[str, float] = attrs.field(factory=dict)
    stop: str | tuple[str, ...] | None = attrs.field(default=None, validator=stop_strings(2, 4))
    later: Any = attrs.field(default=None, validator=not_yet([], 1))


def read(**fields: Any) -> Tree:
    return read_request(encode_json({"name": "t"} | fields), Tree)[0]


def refuse(body: dict[str, Any] | bytes) -> tuple[Issue, ...]:
    with pytest.raises(InvalidRequestError) as caught:
        read_request(body if isinstance(body, bytes) else encode_json(body), Tree)
    return caught.value.issues


def test_absent_fields_have_their_defaults() -> None:
    assert read() == Tree(name="t")


@pytest.mark.parametrize("field", [field.name for field in attrs.fields(Tree) if field.name != "name"])
def test_null_is_the_default(field: str) -> None:
    assert read(**{field: None}) == Tree(name="t")


def test_nested_values_become_objects() -> None:
    tree = read(leaves=[{"kind": "text"}, {"kind": "text", "size": 2}], weights={"7": 1}, words=["x"])
    assert tree.leaves == (Leaf(kind="text"), Leaf(kind="text", size=2))
    assert tree.weights == {"7": 1.0}
    assert tree.words == ("x",)
    assert read(leaves="plain").leaves == "plain"


def test_an_integer_is_a_number() -> None:
    ratio = read(ratio=1).ratio
    assert (ratio, type(ratio)) == (1.0, float)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", 3, "wanted a string, got 3"),
        ("name", None, "wanted a string, got null"),
        ("ratio", "0.5", 'wanted a number, got "0.5"'),
        ("ratio", True, "wanted a number, got true"),
        ("count", True, "wanted an integer, got true"),
        ("count", 2.0, "wanted an integer, got 2.0"),
        ("count", [], "wanted an integer, got a list"),
        ("is_on", "yes", 'wanted true or false, got "yes"'),
        ("is_on", 1, "wanted true or false, got 1"),
        ("leaves", 1, "wanted a string or a list, got 1"),
        ("leaves", {}, "wanted a string or a list, got an object"),
        ("words", "abc", 'wanted a list, got "abc"'),
        ("weights", [1], "wanted an object, got a list"),
        ("stop", 5, "wanted a string or a list, got 5"),
        ("ratio", 1.5, "wanted 0 to 1, got 1.5"),
        ("count", -1, "wanted 0 or more, got -1"),
        ("words", [], "wanted at least one item, got an empty list"),
        ("words", ["a"] * 4, "wanted at most 3 items, got 4"),
    ],
)
def test_wrong_values_say_what_was_wanted(field: str, value: Any, message: str) -> None:
    assert refuse({"name": "t", field: value}) == (Issue((field,), message),)


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "name"),
        ({"name": "t", "leaves": [{"kind": "text"}, {}]}, "leaves[1].kind"),
        ({"name": "t", "leaves": [{"kind": "text", "size": "x"}]}, "leaves[0].size"),
        ({"name": "t", "leaves": [7]}, "leaves[0]"),
        ({"name": "t", "words": ["a", 1]}, "words[1]"),
        ({"name": "t", "weights": {"a b": "x"}}, 'weights["a b"]'),
        ({"name": "t", "stop": ["a", ""]}, "stop[1]"),
        ({"name": "t", "stop": ""}, "stop"),
        ({"name": "t", "stop": ["12345"]}, "stop[0]"),
        (b"[]", ""),
        (b"null", ""),
        (b"3", ""),
    ],
)
def test_errors_carry_the_path(body: Any, where: str) -> None:
    assert [issue.where for issue in refuse(body)] == [where]


def test_all_errors_are_listed_up_to_a_limit() -> None:
    issues = refuse({"name": 1, "count": "x", "is_on": 2})
    assert [issue.where for issue in issues] == ["name", "count", "is_on"]
    assert len(refuse({"name": "t", "words": [1] * 100})) == MAX_ISSUES


def test_the_message_counts_the_other_errors() -> None:
    error = InvalidRequestError(Issue(("a",), "is wrong"), Issue(("b",), "too"), Issue(("c",), "too"))
    assert str(error) == "a: is wrong (and 2 more)"


def test_unsupported_values_are_marked() -> None:
    assert refuse({"name": "t", "later": 2})[0].is_unsupported
    assert refuse({"name": "t", "leaves": [{"kind": "image"}]})[0].is_unsupported
    assert not refuse({"name": "t", "count": -1})[0].is_unsupported


@pytest.mark.parametrize("value", [True, 1.0, [1], {}])
def test_a_harmless_value_of_another_type_is_not_harmless(value: Any) -> None:
    assert read(later=1).later == 1
    assert refuse({"name": "t", "later": value})[0].is_unsupported


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyError, TypeError])
def test_a_fault_in_a_check_is_not_the_clients_mistake(fault: type[Exception]) -> None:
    def check(*_: Any) -> None:
        raise fault

    broken = attrs.make_class("Broken", {"size": attrs.field(default=1, type=int, validator=check)})
    with pytest.raises(fault):
        read_request(b"{}", broken)


def test_unknown_fields_are_named_once() -> None:
    body = {
        "name": "t",
        "odd": 1,
        "leaves": [{"kind": "text", "x": 1, "silent": 2}, {"kind": "text", "x": 2}],
    }
    assert read_request(encode_json(body), Tree)[1] == ("odd", "leaves[].x")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{'a':1}",
        b'{"a":NaN}',
        b"[Infinity]",
        b"-Infinity",
        b'{"a":1,}',
        b'"\xff"',
        b'"\n"',
        b"nul",
    ],
)
def test_what_is_not_json_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedBodyError):
        parse_json(body)


@pytest.mark.parametrize("body", [b"[1e999]", b"[-1e999]", b"[" + b"9" * 21 + b"]", b"9" * 5000])
def test_numbers_out_of_range_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_json(body)


@pytest.mark.parametrize("body", [b'{"a":1,"a":1}', b'[{"b":{"c":1,"d":2,"c":3}}]', b'{"a":1,"\\u0061":2}'])
def test_a_key_given_twice_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="appears twice"):
        parse_json(body)


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a":1}') == {"a": 1}


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"k":', "}")])
def test_nesting_is_limited(opening: str, closing: str) -> None:
    def nest(depth: int) -> bytes:
        return (opening * depth + '"[[{{"' + closing * depth).encode()

    assert parse_json(nest(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(MalformedBodyError, match="nested"):
            parse_json(nest(depth))


def test_brackets_inside_strings_are_no_nesting() -> None:
    text = "[{" * 1000 + '"\\'
    assert parse_json(encode_json([text, "]"])) == [text, "]"]


def test_a_string_without_end_is_refused_in_linear_time() -> None:
    body = b"[" + b"[]," * MAX_DEPTH + b'"' + b'\\"' * 500_000
    started = time.monotonic()
    with pytest.raises(MalformedBodyError, match="not JSON"):
        parse_json(body)
    # Quadratic would take minutes.
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (rb'"a\ud800b"', "a\ufffdb"),
        (rb'"\udc00\ud800"', "\ufffd\ufffd"),
        (rb'"\ud83d\ude00"', "😀"),
        (rb'"\\ud800"', r"\ud800"),
    ],
)
def test_lone_surrogates_are_replaced(body: bytes, text: str) -> None:
    assert parse_json(body) == text
    assert parse_json(b'{"k":[' + body + b"]}") == {"k": [text]}
    assert parse_json(b"{" + body + b":1}") == {text: 1}


@given(st.recursive(st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.text(), st.lists))
def test_json_that_is_fine_is_read_as_it_is(value: Any) -> None:
    assert parse_json(encode_json(value)) == value


@given(st.binary(max_size=64) | st.text(alphabet='[]{}",:\\u0dn1e-. ', max_size=64).map(str.encode))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(MalformedBodyError, InvalidRequestError):
        parse_json(body)


def test_descriptions_are_short_and_keep_contents_out() -> None:
    assert describe_value(["secret"]) == "a list"
    assert describe_value({"k": "secret"}) == "an object"
    assert len(describe_value("x" * 10_000)) < 60
