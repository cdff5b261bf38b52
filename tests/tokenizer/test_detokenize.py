"""Ids -> bytes -> whole characters."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from astrai_triton.tokenizer.detokenize import (
    Detokenizer,
    byte_level_bytes,
    sentencepiece_bytes,
    whole_texts,
)

SINGLE_BYTES = [bytes([byte]) for byte in range(256)]


def make(table: list[bytes]) -> Detokenizer:
    return Detokenizer(table, whole_texts(table))


def test_every_byte_has_one_stand_in() -> None:
    assert sorted(byte_level_bytes(char) for char in ByteLevel.alphabet()) == SINGLE_BYTES


@pytest.mark.parametrize("text", [" a\n", "naïve", "🎉", "\x00\x7f\xa0\xad"])
def test_a_byte_level_token_gives_back_the_bytes_of_its_text(text: str) -> None:
    ((token, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert byte_level_bytes(token) == text.encode()


@pytest.mark.parametrize("token", ["a b", "日本", "<think>\n", "\xa0"])
def test_a_token_outside_the_byte_alphabet_stands_for_its_own_text(token: str) -> None:
    assert byte_level_bytes(token) == token.encode()


@pytest.mark.parametrize(
    ("token", "data"),
    [
        ("▁the", b" the"),
        ("a▁▁b", b"a  b"),
        ("<0x0A>", b"\n"),
        ("<0xfF>", b"\xff"),
        ("<0x0>", b"<0x0>"),
        ("é", "é".encode()),
    ],
)
def test_a_sentencepiece_token_is_a_byte_or_text_with_spaces(token: str, data: bytes) -> None:
    assert sentencepiece_bytes(token) == data


def test_an_emoji_split_over_four_tokens_comes_whole_with_the_last() -> None:
    stream = make(SINGLE_BYTES)
    assert [stream.push(byte) for byte in "a🎉b".encode()] == ["a", "", "", "", "🎉", "b"]
    assert stream.flush() == ""


def test_an_end_inside_a_character_is_flushed_as_one_replacement_character() -> None:
    stream = make(SINGLE_BYTES)
    assert [stream.push(byte) for byte in "é🎉".encode()[:-1]] == ["", "é", "", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_stream_goes_on_after_a_flush_as_a_new_one() -> None:
    stream = make(SINGLE_BYTES)
    stream.push(0xF0)
    stream.flush()
    assert "".join(stream.push(byte) for byte in "é".encode()) == "é"


def test_a_leading_space_is_kept() -> None:
    assert make([b" the"]).push(0) == " the"


@pytest.mark.parametrize("token_id", [-1, -256, 256, 10**9])
def test_ids_outside_the_vocabulary_give_no_text(token_id: int) -> None:
    assert make(SINGLE_BYTES).push(token_id) == ""


def test_an_unknown_id_inside_a_character_does_not_break_it() -> None:
    stream = make([*SINGLE_BYTES, b""])
    assert [stream.push(i) for i in (0xC3, 256, 999, 0xA9)] == ["", "", "", "é"]


@given(st.lists(st.binary(max_size=5), min_size=1), st.data())
def test_pieces_joined_equal_the_bytes_decoded_at_once(table: list[bytes], data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-1, len(table))))
    stream = make(table)
    text = "".join(map(stream.push, ids)) + stream.flush()
    joined = b"".join(table[i] for i in ids if 0 <= i < len(table))
    assert text == joined.decode("utf-8", "replace")


@given(st.text(), st.lists(st.integers(0, 20)))
def test_text_cut_anywhere_streams_without_replacement_characters(text: str, cuts: list[int]) -> None:
    data = text.encode()
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    table = [data[start:stop] for start, stop in itertools.pairwise(bounds)]
    stream = make(table)
    pieces = [stream.push(i) for i in range(len(table))]
    assert "".join(pieces) == text
    assert stream.flush() == ""
