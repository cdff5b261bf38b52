"""Frames of an event stream."""

from __future__ import annotations

import json

import pytest

from astrai_server.sse import DONE, encode_json, encode_text, format_data, format_event, split_frame


def test_frames_end_with_an_empty_line() -> None:
    assert format_data({"a": 1}) == b'data: {"a":1}\n\n'
    assert format_event("ping", {"a": 1}) == b'event: ping\ndata: {"a":1}\n\n'
    assert DONE == b"data: [DONE]\n\n"


@pytest.mark.parametrize("text", ["é😀", "\u2028", "a\nb\r\n", "\ud800", '"\\', "\x00"])
def test_any_text_becomes_ascii_without_line_breaks(text: str) -> None:
    encoded = encode_text(text)
    assert encoded == encode_json(text)
    assert encoded.isascii()
    assert not set(encoded) & {10, 13}
    assert json.loads(encoded) == text


def test_nan_is_never_written() -> None:
    with pytest.raises(ValueError):
        encode_json(float("nan"))


def test_a_split_frame_takes_any_text() -> None:
    head, tail = split_frame(format_data({"model": "cut here", "text": "cut here", "n": 1}), "cut here")
    frame = head + encode_json('say "hi"') + tail
    assert json.loads(frame.removeprefix(b"data: ")) == {"model": "cut here", "text": 'say "hi"', "n": 1}
