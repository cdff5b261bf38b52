"""What ``astrai chat`` reads: text of others, event streams, frames, addresses."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_server.chat.address import find_api, is_loopback
from astrai_server.chat.control import ControlFilter, make_line, strip_controls
from astrai_server.chat.errors import ChatError, MalformedFrameError
from astrai_server.chat.event import MAX_EVENT_BYTES, EventReader
from astrai_server.chat.reply import Delta, Usage, describe_body, read_frame, read_models


def cut(text: Any, seed: int) -> list[Any]:
    """Pieces of random length, most of them short."""
    rng, pieces = random.Random(seed), []
    while text:
        size = rng.choice((1, 1, 1, 2, 3, 7))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


# Control characters


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mred\x1b[0mb", "aredb"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "alink"),
        ("\x1b]52;c;ZXZpbA==\x9ca", "a"),
        ("\x1bPq#0\x1b\\a\x1b_app\x1b\\b\x1b^pm\x1b\\c\x1bXsos\x1b\\d", "abcd"),
        ("\x1bc\x1b(Ba\x1b#8b\x1b7c", "abc"),
        ("\x9b2Ja\x9d0;t\x07b\x90q\x9cc", "abc"),
        ("bell\x07 back\x08 null\x00 del\x7f nel\x85 vt\x0bff\x0c", "bell back null del nel vtff"),
        ("a\r\nb\rc\n\rd\te", "a\nb\nc\n\nd\te"),
        ("a\x1b]never ends\nb", "a\nb"),
        ("a\x1b[12\nb", "a\nb"),
        ("a\x1b[1é\x1bäb", "aéäb"),
        ("a\x1b[1\x18b\x1b]x\x1ac", "abc"),
        ("a\x1b\x1b[31mb", "ab"),
        ("a\x1b[3\x1b[4mb", "ab"),
        ("\ud83d\ude00 \ud83d \ude00", "😀 \ufffd \ufffd"),
        ("grün 漢字 😀", "grün 漢字 😀"),
    ],
)
def test_escape_sequences_and_controls_go_and_the_rest_stays(text: str, shown: str) -> None:
    assert strip_controls(text) == shown
    for seed in range(20):
        pieces = ControlFilter()
        assert "".join(pieces.feed(piece) for piece in cut(text, seed)) == shown


@given(st.text(st.sampled_from("\x1b[]P\\;0mab\r\n\x07\x9b\x9c\x18é\ud83d\ude00")), st.integers(0, 99))
def test_no_control_gets_through_however_the_text_is_cut(text: str, seed: int) -> None:
    pieces = ControlFilter()
    shown = "".join(pieces.feed(piece) for piece in cut(text, seed))
    assert shown == strip_controls(text)
    assert not set(shown) - set("[]P\\;0mab\né😀\ufffd")


def test_a_line_is_short_and_clean() -> None:
    assert make_line(" a\n\n b\x1b[2J\t") == "a b"
    assert make_line("x" * 50, 10) == "xxxxxxx..."


# Event streams


EVENTS = (
    ": comment\r\n\r\n"
    'data: {"a": "grün 😀"}\n\n'
    "event: message\nid: 7\nretry: 10\ndata:one\ndata: two\ndata\n\n"
    "data: three\r\rdata: four\r\n\r\n"
    "other: x\n\n"
    "data:  five\n\n\n\n"
    "data: [DONE]\n\n"
)
DATA = ['{"a": "grün 😀"}', "one\ntwo\n", "three", "four", " five", "[DONE]"]


@pytest.mark.parametrize("seed", range(30))
def test_events_come_out_however_their_bytes_are_cut(seed: int) -> None:
    reader = EventReader()
    assert [data for piece in cut(EVENTS.encode(), seed) for data in reader.feed(piece)] == DATA
    assert list(reader.finish()) == []


def test_a_byte_order_mark_is_skipped_and_broken_utf8_replaced() -> None:
    assert list(EventReader().feed(b"\xef\xbb\xbfdata: a\xff\n\n")) == ["a\ufffd"]


def test_an_event_without_its_empty_line_comes_at_the_end() -> None:
    for data in (b"data: a", b"data: a\n"):
        reader = EventReader()
        assert list(reader.feed(data)) == []
        assert list(reader.finish()) == ["a"]


@pytest.mark.parametrize("line", [b"data: " + b"x" * 65536, b"data: " + b"x" * 65536 + b"\n"])
def test_an_event_without_end_is_refused(line: bytes) -> None:
    reader = EventReader()
    for _ in range(MAX_EVENT_BYTES // len(line)):
        assert list(reader.feed(line)) == []
    with pytest.raises(ChatError, match="more than 16 MiB"):
        list(reader.feed(line))


# Frames


@pytest.mark.parametrize(
    ("frame", "delta"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Delta()),
        ({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}, Delta(text="a")),
        ({"choices": [{"delta": {"content": None, "reasoning_content": "hm"}}]}, Delta(reasoning="hm")),
        ({"choices": [{"delta": {"reasoning": "hm"}}]}, Delta(reasoning="hm")),
        ({"choices": [{"delta": {"refusal": "no"}}]}, Delta(text="no")),
        ({"choices": [{"delta": None, "finish_reason": "stop"}]}, Delta(finish_reason="stop")),
        (
            {"choices": [{"delta": {"content": [{"type": "text", "text": "a"}, {"text": "b"}, 3]}}]},
            Delta(text="ab"),
        ),
        (
            {"choices": [{"message": {"content": "all"}, "finish_reason": "stop"}], "usage": None},
            Delta(text="all", finish_reason="stop"),
        ),
        (
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 9,
                    "completion_tokens": 2,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
            Delta(usage=Usage(9, 2, 4)),
        ),
        ({"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}, Delta(usage=Usage(9, 2))),
        ({"choices": [], "usage": {"prompt_tokens": "9", "completion_tokens": -1}}, Delta()),
        ({"choices": "?", "usage": [], "error": None}, Delta()),
    ],
)
def test_frames_of_all_sorts_are_read(frame: dict[str, Any], delta: Delta) -> None:
    assert read_frame(json.dumps(frame)) == delta


@pytest.mark.parametrize("data", ["", "{", "nonsense \x1b[2J", "[]", "3", "[" * 100_000])
def test_a_frame_that_is_no_object_is_named(data: str) -> None:
    with pytest.raises(MalformedFrameError, match=r"the server sent a frame that is not") as caught:
        read_frame(data)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({"error": {"message": "out of\nmemory\x1b[2J", "code": 500}}, "out of memory"),
        ({"error": "overloaded"}, "overloaded"),
        ({"error": {"code": "busy"}}, "busy"),
        ({"error": {"code": 3}}, '{"code": 3}'),
        ({"object": "error", "message": "gone"}, "gone"),
    ],
)
def test_an_error_frame_is_an_error(frame: dict[str, Any], message: str) -> None:
    with pytest.raises(ChatError) as caught:
        read_frame(json.dumps(frame))
    assert str(caught.value) == f"the server reports an error: {message}"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"msg": "field required"}]}', "field required"),
        (b'{"message": "try later"}', "try later"),
        (b'{"x": 1}', ""),
        (b'["x"]', '["x"]'),
        (b"Bad Gateway\n", "Bad Gateway"),
        (b"<html>502</html>", ""),
        (b"", ""),
    ],
)
def test_the_cause_in_an_error_body_is_one_line(body: bytes, text: str) -> None:
    assert describe_body(body) == text


def test_model_lists_are_read_or_refused() -> None:
    assert read_models(b'{"data": [{"id": "a"}, {"id": "b"}, {"id": 3}]}') == ["a", "b"]
    for body in (b"", b"[]", b'{"data": 3}', b'{"data": ["a"]}', b'{"data": [{}]}'):
        with pytest.raises(ChatError, match="no list of models; name one with --model"):
            read_models(body)


# Addresses


@pytest.mark.parametrize(
    ("url", "api"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"),
        ("http://h/v1/chat/completions", "http://h/v1"),
        ("localhost:8000", "http://localhost:8000/v1"),
        ("https://h/openai", "https://h/openai/v1"),
        ("https://h/v1beta/openai", "https://h/v1beta/openai"),
        ("http://[::1]:80", "http://[::1]:80/v1"),
    ],
)
def test_every_way_to_write_a_base_url_is_understood(url: str, api: str) -> None:
    assert find_api(url) == api


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://h", "http://h:99999", "http://[::1", "h?a=b", "http://h/#x"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="wanted"):
        find_api(url)


@pytest.mark.parametrize("url", ["http://me:geheim@h", "http://me:geheim@h:99999", "ftp://me:ge@geheim@h/@"])
def test_a_password_in_an_address_is_refused_unseen(url: str) -> None:
    with pytest.raises(ValueError, match="wanted") as caught:
        find_api(url)
    assert "geheim" not in str(caught.value)


def test_loopback_is_known() -> None:
    assert all(is_loopback(url) for url in ("http://127.0.0.1:1", "http://[::1]/v1", "http://localhost"))
    assert not any(is_loopback(url) for url in ("http://10.0.0.1", "https://api.example.org/v1"))
