"""Tokenizers from GGUF metadata."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_triton.errors import ChatTemplateError, TokenizerError
from astrai_triton.tokenizer import Tokenizer, from_gguf

Metadata = dict[str, Any]
NORMAL, UNUSED = 1, 5


@pytest.fixture(scope="module")
def byte_level(byte_level_metadata: Metadata) -> Tokenizer:
    return from_gguf(byte_level_metadata)


@pytest.fixture(scope="module")
def sentencepiece(sentencepiece_metadata: Metadata) -> Tokenizer:
    return from_gguf(sentencepiece_metadata)


def merge_by_score(metadata: Metadata, text: str) -> list[int]:
    """SentencePiece's BPE, plainly: always merge the neighbours that give the best-scored piece."""
    kinds, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    ids = {piece: i for i, piece in enumerate(metadata["tokenizer.ggml.tokens"])}
    normal = {piece: scores[i] for piece, i in ids.items() if kinds[i] == NORMAL}
    symbols = list(text)
    while True:
        pairs = [
            (-normal[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in normal
        ]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    pieces = [[s] if s in normal else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
    return [ids[piece] for group in pieces for piece in group]


TEXTS = st.text(alphabet=st.sampled_from("the in gab<|>\n0xA1é日🎉"), min_size=1, max_size=30)


@given(text=TEXTS)
def test_sentencepiece_merges_by_score(
    sentencepiece_metadata: Metadata, sentencepiece: Tokenizer, text: str
) -> None:
    text = re.sub(" +", " ", text)
    expected = merge_by_score(sentencepiece_metadata, "▁" + text.replace(" ", "▁"))
    assert sentencepiece.encode(text, add_bos=False) == expected


@given(text=TEXTS)
def test_runs_of_spaces_are_tokens_before_anything_merges(
    sentencepiece_metadata: Metadata, text: str
) -> None:
    tokenizer = from_gguf({**sentencepiece_metadata, "tokenizer.ggml.add_space_prefix": False})
    expected: list[int] = []
    for piece in re.findall("   |  |(?:[^ ]| (?! ))+", text):
        runs = {"  ": [4], "   ": [5]}
        expected += runs.get(piece) or merge_by_score(sentencepiece_metadata, piece.replace(" ", "▁"))
    assert tokenizer.encode(text, add_bos=False) == expected


def test_sentencepiece_falls_back_to_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("🎉", add_bos=False)
    assert b"".join(map(sentencepiece.token_bytes, ids)) == " 🎉".encode()
    assert len(ids) == 5


def test_text_that_reads_like_a_byte_token_is_not_that_byte(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.decode(sentencepiece.encode("<0x0A>")) == " <0x0A>"


def test_the_space_before_the_first_word_can_be_switched_off(sentencepiece_metadata: Metadata) -> None:
    tokenizer = from_gguf({**sentencepiece_metadata, "tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.decode(tokenizer.encode("the")) == "the"


def test_user_defined_white_space_is_found_in_plain_text_in_either_spelling(
    sentencepiece_metadata: Metadata,
) -> None:
    plain = [
        token.replace("▁▁", "  ").replace("  ▁", "   ")
        for token in sentencepiece_metadata["tokenizer.ggml.tokens"]
    ]
    for tokens in (plain, sentencepiece_metadata["tokenizer.ggml.tokens"]):
        metadata = {
            **sentencepiece_metadata,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.add_space_prefix": False,
        }
        tokenizer = from_gguf(metadata)
        assert tokenizer.encode("     ", add_bos=False) == [5, 4]
        assert tokenizer.decode([5, 4]) == "     "
        assert tokenizer.special_tokens.keys() == {"<unk>", "<s>", "</s>", "<|user|>"}


def test_the_unknown_token_takes_what_nothing_expresses(sentencepiece_metadata: Metadata) -> None:
    kinds = [UNUSED if kind == 6 else kind for kind in sentencepiece_metadata["tokenizer.ggml.token_type"]]
    tokenizer = from_gguf({**sentencepiece_metadata, "tokenizer.ggml.token_type": kinds})
    ids = tokenizer.encode("🎉日the", add_bos=False)
    assert ids.count(0) == 1
    assert tokenizer.decode(ids) == " the"


def test_sentencepiece_files_begin_with_bos_unless_they_say_otherwise(
    sentencepiece_metadata: Metadata,
) -> None:
    assert from_gguf(sentencepiece_metadata).encode("the")[0] == 1
    off = from_gguf({**sentencepiece_metadata, "tokenizer.ggml.add_bos_token": False})
    assert 1 not in off.encode("the")


def test_phi3_control_tokens_take_the_white_space_after_them(sentencepiece_metadata: Metadata) -> None:
    phi3 = from_gguf({**sentencepiece_metadata, "general.architecture": "phi3"})
    assert phi3.encode("<|user|>\n the", allow_special=True) == phi3.encode("<|user|>the", allow_special=True)
    llama = from_gguf({**sentencepiece_metadata, "general.architecture": "llama"})
    assert llama.encode("<|user|>\n the", allow_special=True) != llama.encode(
        "<|user|>the", allow_special=True
    )


def test_the_bos_default_follows_the_splitting(byte_level_metadata: Metadata) -> None:
    metadata = {key: value for key, value in byte_level_metadata.items() if not key.endswith("add_bos_token")}
    assert not from_gguf(metadata).add_bos
    assert from_gguf({**metadata, "tokenizer.ggml.pre": "llama-bpe"}).add_bos


def test_a_bos_token_that_is_not_there_is_not_added(byte_level_metadata: Metadata) -> None:
    metadata = {key: value for key, value in byte_level_metadata.items() if not key.endswith("bos_token_id")}
    tokenizer = from_gguf({**metadata, "tokenizer.ggml.add_bos_token": True})
    assert tokenizer.bos_id is None
    assert not tokenizer.add_bos


def test_qwen_text_is_composed_first(byte_level_metadata: Metadata) -> None:
    qwen = from_gguf({**byte_level_metadata, "tokenizer.ggml.pre": "qwen2"})
    assert qwen.encode("e\u0301") == qwen.encode("é")


def test_digits_are_split_singly(byte_level: Tokenizer) -> None:
    assert [byte_level.token_bytes(i) for i in byte_level.encode("1234567890")] == [
        bytes([c]) for c in b"1234567890"
    ]


def test_tokens_shown_in_files_as_user_defined_are_text(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(3) == b"<tool_call>"
    assert "<tool_call>" not in byte_level.special_tokens


def test_unused_tokens_are_nothing(byte_level_metadata: Metadata) -> None:
    kinds = list(byte_level_metadata["tokenizer.ggml.token_type"])
    kinds[5] = UNUSED
    tokenizer = from_gguf({**byte_level_metadata, "tokenizer.ggml.token_type": kinds})
    assert tokenizer.token_bytes(5) == b""
    assert 5 not in tokenizer.encode("<think>", allow_special=True)


def test_stop_ids_are_the_ends_that_the_file_names_and_end_of_text(byte_level_metadata: Metadata) -> None:
    metadata = {key: value for key, value in byte_level_metadata.items() if key != "tokenizer.chat_template"}
    assert from_gguf(metadata).stop_ids == {0, 2}
    ends = {
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.eom_token_id": 3,
    }
    assert from_gguf({**metadata, **ends}).stop_ids == {0, 1, 2, 3}


def test_the_token_after_an_assistant_message_is_a_stop_id(byte_level_metadata: Metadata) -> None:
    metadata = {**byte_level_metadata, "tokenizer.ggml.eos_token_id": 0}
    assert from_gguf(metadata).stop_ids == {0, 2}


def test_a_template_that_refuses_the_probe_leaves_the_declared_stop_ids(
    byte_level_metadata: Metadata,
) -> None:
    template = "{{ raise_exception('no') }}"
    assert from_gguf({**byte_level_metadata, "tokenizer.chat_template": template}).stop_ids == {0, 2}


def test_a_file_without_token_types_still_has_its_named_special_tokens(byte_level_metadata: Metadata) -> None:
    metadata = {key: value for key, value in byte_level_metadata.items() if not key.endswith("token_type")}
    tokenizer = from_gguf(metadata)
    assert tokenizer.special_tokens == {"<|im_start|>": 1, "<|im_end|>": 2}
    assert not {1, 2} & {*tokenizer.encode("<|im_start|><|im_end|>")}


@pytest.mark.parametrize("name", ["tokens", "merges"])
def test_a_missing_array_is_an_error_that_names_it(byte_level_metadata: Metadata, name: str) -> None:
    metadata = {key: value for key, value in byte_level_metadata.items() if key != f"tokenizer.ggml.{name}"}
    with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.{name}: missing"):
        from_gguf(metadata)


def test_a_sentencepiece_file_needs_scores(sentencepiece_metadata: Metadata) -> None:
    metadata = {key: value for key, value in sentencepiece_metadata.items() if not key.endswith("scores")}
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.scores: missing"):
        from_gguf(metadata)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", None, "wanted 'gpt2'.*got None"),
        ("model", "bert", "got 'bert'"),
        ("pre", "bloom", "got 'bloom'"),
        ("tokens", [], "at least one token"),
        ("tokens", "abc", "wanted an array"),
        ("tokens", ["a", 3], r"tokens\[1\]: wanted text, got 3"),
        ("token_type", [1, 1], "one per token"),
        ("token_type", ["x"], r"token_type\[0\]: wanted integer"),
        ("merges", ["ab"], "two tokens and a space"),
        ("merges", ["a b c"], "two tokens and a space"),
        ("merges", ["nothere norhere"], "contradicts itself"),
        ("eos_token_id", 10**6, "wanted a token id below"),
        ("bos_token_id", -1, "wanted a token id below"),
        ("eos_token_id", "x", "wanted a token id below"),
        ("add_bos_token", "yes", "wanted true or false"),
    ],
)
def test_bad_metadata_is_an_error_that_names_the_key(
    byte_level_metadata: Metadata, key: str, value: object, message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        from_gguf({**byte_level_metadata, f"tokenizer.ggml.{key}": value})


def test_scores_must_match_the_tokens(sentencepiece_metadata: Metadata) -> None:
    with pytest.raises(TokenizerError, match=r"scores: wanted one per token"):
        from_gguf({**sentencepiece_metadata, "tokenizer.ggml.scores": [0.0]})


@pytest.mark.parametrize("template", ["{% if %}", 3])
def test_a_broken_chat_template_is_an_error(byte_level_metadata: Metadata, template: object) -> None:
    with pytest.raises(ChatTemplateError):
        from_gguf({**byte_level_metadata, "tokenizer.chat_template": template})


def test_a_template_for_tools_is_used_with_tools(byte_level_metadata: Metadata) -> None:
    tokenizer = from_gguf(
        {**byte_level_metadata, "tokenizer.chat_template.tool_use": "tools {{ bos_token }}"}
    )
    ids = tokenizer.encode_chat([{"role": "user", "content": "x"}], tools=[{"type": "function"}])
    assert tokenizer.decode(ids, skip_special=False) == "tools <|im_start|>"
