"""Tokenizers from Hugging Face directories."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from astrai_triton.errors import TokenizerError
from astrai_triton.tokenizer import Tokenizer, from_directory, from_gguf

Document = dict[str, Any]
Edit = Callable[[], Document]
Write = Callable[..., Path]

TOOL_CALL = 3
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
FRAGMENTS = st.one_of(
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<tool_call>", "<think>", "<s>", "</s>", "<unk>", " ", "\n", "▁"]
    ),
    st.sampled_from(["<|im_", "end|>", "the sea", "1234", "don't", " \t ", "🎉", "é", "_", "a"]),
    st.text(max_size=4),
)
TEXTS = st.lists(FRAGMENTS, max_size=10).map("".join)


def reference(directory: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_level_pair(
    byte_level_file: Document, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, transformers.PreTrainedTokenizerFast]:
    """A byte-level tokenizer whose added tokens take white space along, ours and transformers'."""
    document = copy.deepcopy(byte_level_file)
    flags = {
        1: {"lstrip": True},
        2: {"rstrip": True},
        5: {"lstrip": True, "rstrip": True},
    }
    for token in document["added_tokens"]:
        token.update(flags.get(token["id"], {}))
    directory = tmp_path_factory.mktemp("byte_level")
    (directory / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    return from_directory(directory), reference(directory)


@pytest.fixture(scope="module", params=["first", "always", "never", "prepend"])
def sentencepiece_pair(
    request: pytest.FixtureRequest, sentencepiece_file: Document, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, transformers.PreTrainedTokenizerFast]:
    """A SentencePiece-like tokenizer with every way of leading spaces, ours and transformers'."""
    document = copy.deepcopy(sentencepiece_file)
    if request.param == "prepend":
        document["pre_tokenizer"] = None
        steps = [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]
        document["normalizer"] = {"type": "Sequence", "normalizers": steps}
    else:
        document["pre_tokenizer"]["prepend_scheme"] = request.param
    directory = tmp_path_factory.mktemp("sentencepiece")
    (directory / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    return from_directory(directory), reference(directory)


@given(text=TEXTS)
def test_byte_level_ids_equal_those_of_transformers(
    byte_level_pair: tuple[Tokenizer, transformers.PreTrainedTokenizerFast], text: str
) -> None:
    ours, theirs = byte_level_pair
    assert ours.encode(text, allow_special=True) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("char", [*"a_é日9¼½²Ⅳ٣-.<\n ", "\u0301", "\u200d", "\u203f", "Ⓐ", "🅰", "🎉"])
def test_what_a_word_is_agrees_with_transformers(edit: Edit, write_directory: Write, char: str) -> None:
    document = edit()
    document["added_tokens"][TOOL_CALL]["single_word"] = True
    directory = write_directory(document)
    ours, theirs = from_directory(directory), reference(directory)
    for text in (f"{char}<tool_call>", f"<tool_call>{char}", f" <tool_call> {char}"):
        assert ours.encode(text, allow_special=True) == theirs.encode(text, add_special_tokens=False)


@given(text=TEXTS)
def test_sentencepiece_ids_equal_those_of_transformers(
    sentencepiece_pair: tuple[Tokenizer, transformers.PreTrainedTokenizerFast], text: str
) -> None:
    ours, theirs = sentencepiece_pair
    assert ours.encode(text, allow_special=True) == theirs.encode(text, add_special_tokens=False)


@given(text=TEXTS)
def test_a_directory_and_a_gguf_of_one_vocabulary_give_the_same_ids(
    byte_level_file: Document,
    byte_level_metadata: Document,
    tmp_path_factory: pytest.TempPathFactory,
    text: str,
) -> None:
    directory = tmp_path_factory.getbasetemp() / "same"
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(byte_level_file), "utf-8")
    ours, other = from_directory(directory), from_gguf(byte_level_metadata)
    for allow_special in (True, False):
        ids = ours.encode(text, allow_special=allow_special)
        assert ids == other.encode(text, allow_special=allow_special)
        assert ours.decode(ids, skip_special=False) == other.decode(ids, skip_special=False)


def test_merges_are_read_in_either_spelling(edit: Edit, write_directory: Write) -> None:
    document = edit()
    merges = document["model"]["merges"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    found = []
    for spelling in (pairs, [" ".join(pair) for pair in pairs]):
        document["model"]["merges"] = spelling
        found.append(from_directory(write_directory(document)).encode("the mysterious sea"))
    assert found[0] == found[1]


def test_white_space_tokens_are_part_of_plain_text(
    sentencepiece_file: Document, write_directory: Write
) -> None:
    document = copy.deepcopy(sentencepiece_file)
    size = len(document["model"]["vocab"])
    off = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for i, content in enumerate(("\n\n", "<b>")):
        document["model"]["vocab"][content] = size + i
        document["added_tokens"].append({"id": size + i, "content": content, **off})
    tokenizer = from_directory(write_directory(document))
    ids = tokenizer.encode("a\n\n<b>")
    assert size in ids
    assert size + 1 not in ids
    assert tokenizer.decode(ids) == " a\n\n<b>"
    assert tokenizer.encode("a\n\n<b>", allow_special=True)[-1] == size + 1


def test_a_control_token_that_merges_could_build_is_never_built(edit: Edit, write_directory: Write) -> None:
    document = edit()
    size = len(document["model"]["vocab"])
    document["model"]["vocab"]["ab"] = size
    document["model"]["merges"].insert(0, ["a", "b"])
    document["model"]["ignore_merges"] = True
    document["added_tokens"].append({"id": size, "content": "ab", "special": True})
    tokenizer = from_directory(write_directory(document))
    assert size not in tokenizer.encode("ab")
    assert tokenizer.encode("ab", allow_special=True) == [size]


def test_text_that_reads_like_a_byte_token_is_never_that_byte(
    sentencepiece_file: Document, write_directory: Write
) -> None:
    document = copy.deepcopy(sentencepiece_file)
    vocab = document["model"]["vocab"]
    for end in range(1, 7):
        piece = "<0x0A>"[:end]
        vocab.setdefault(piece[-1], len(vocab))
        if end > 1:
            vocab.setdefault(piece, len(vocab))
            document["model"]["merges"].insert(0, [piece[:-1], piece[-1]])
    tokenizer = from_directory(write_directory(document))
    assert tokenizer.decode(tokenizer.encode("<0x0A>")) == " <0x0A>"


def test_truncation_and_padding_of_the_file_are_not_applied(edit: Edit, write_directory: Write) -> None:
    document = edit()
    document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tokenizer = from_directory(write_directory(document))
    assert tokenizer.decode(tokenizer.encode("the sea is a vast realm")) == "the sea is a vast realm"


def test_bos_and_eos_are_named_by_the_config_or_the_special_tokens_map(
    edit: Edit, write_directory: Write
) -> None:
    config = {"bos_token": {"content": "<|im_start|>"}, "add_bos_token": True}
    special = {"bos_token": "<think>", "eos_token": "<|im_end|>"}
    tokenizer = from_directory(write_directory(edit(), tokenizer_config=config, special_tokens_map=special))
    assert tokenizer.bos_id == 1
    assert tokenizer.stop_ids == {0, 2}
    assert tokenizer.encode("")[:1] == [1]


@pytest.mark.parametrize(("said", "expected"), [({}, True), ({"add_bos_token": False}, False)])
def test_the_post_processor_decides_about_bos_unless_the_config_does(
    edit: Edit, write_directory: Write, said: Document, expected: bool
) -> None:
    document = edit()
    text = {"Sequence": {"id": "A", "type_id": 0}}
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    document["post_processor"] = {"type": "Sequence", "processors": [template]}
    config = {"bos_token": "<|im_start|>", **said}
    assert from_directory(write_directory(document, tokenizer_config=config)).add_bos is expected


@pytest.mark.parametrize(("value", "expected"), [(4, {0, 4}), ([1, 4], {0, 1, 4}), (None, {0}), ([], {0})])
def test_generation_config_adds_stop_ids(
    edit: Edit, write_directory: Write, value: object, expected: set[int]
) -> None:
    tokenizer = from_directory(write_directory(edit(), generation_config={"eos_token_id": value}))
    assert tokenizer.stop_ids == expected


def test_an_end_of_turn_that_is_not_flagged_special_still_stops_and_is_not_shown(
    edit: Edit, write_directory: Write
) -> None:
    document = edit()
    document["added_tokens"][2]["special"] = False
    tokenizer = from_directory(write_directory(document, template=CHATML))
    assert tokenizer.stop_ids == {0, 2}
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.encode_chat([{"role": "assistant", "content": "<|im_end|>"}]).count(2) == 1


def test_further_special_tokens_are_not_shown(edit: Edit, write_directory: Write) -> None:
    config = {"additional_special_tokens": ["<think>", {"content": "<tool_call>"}, "<nowhere>"]}
    tokenizer = from_directory(write_directory(edit(), tokenizer_config=config))
    assert tokenizer.token_bytes(3) == tokenizer.token_bytes(5) == b""
    assert tokenizer.token_bytes(4) == b"</tool_call>"


def test_added_tokens_of_the_config_count(edit: Edit, write_directory: Write) -> None:
    document = edit()
    size = len(document["model"]["vocab"])
    config = {"added_tokens_decoder": {str(size + 7): {"content": "<|new|>", "special": True}}}
    tokenizer = from_directory(write_directory(document, tokenizer_config=config))
    assert tokenizer.encode("<|new|>", allow_special=True) == [size + 7]
    assert tokenizer.vocab_size == size + 8
    assert tokenizer.token_bytes(size + 3) == b""


@pytest.mark.parametrize(
    "value",
    ["from config", [{"name": "other", "template": "x"}, {"name": "default", "template": "from config"}]],
)
def test_the_chat_template_comes_from_the_config(edit: Edit, write_directory: Write, value: object) -> None:
    tokenizer = from_directory(write_directory(edit(), tokenizer_config={"chat_template": value}))
    assert tokenizer.decode(tokenizer.encode_chat([])) == "from config"


def test_a_chat_template_file_goes_before_the_config(edit: Edit, write_directory: Write) -> None:
    config = {"chat_template": "from config"}
    directory = write_directory(edit(), tokenizer_config=config, chat_template={"chat_template": "from json"})
    assert from_directory(directory).encode_chat([]) == from_directory(directory).encode("from json")
    directory = write_directory(edit(), template="from file")
    assert from_directory(directory).encode_chat([]) == from_directory(directory).encode("from file")


def test_the_template_for_tools_is_found(edit: Edit, write_directory: Write) -> None:
    directory = write_directory(edit(), template="plain")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = from_directory(directory)
    assert tokenizer.encode_chat([], tools=[{}]) == tokenizer.encode("tools")


def test_a_directory_without_a_template_has_none(edit: Edit, write_directory: Write) -> None:
    assert from_directory(write_directory(edit())).chat_template is None


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_a_directory_with_another_tokenizer_only_says_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(TokenizerError, match=rf"wanted tokenizer\.json, got {name}.*save_pretrained"):
        from_directory(tmp_path)


def test_an_empty_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="got no tokenizer"):
        from_directory(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"3"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_an_error_that_names_it(
    edit: Edit, write_directory: Write, name: str, content: bytes
) -> None:
    directory = write_directory(edit())
    (directory / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name):
        from_directory(directory)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["model"], None, "wanted 'BPE', got None"),
        (["model", "type"], "Unigram", "wanted 'BPE', got 'Unigram'"),
        (["model", "end_of_word_suffix"], "</w>", "not implemented"),
        (["model", "vocab"], [["a", 0.0]], "wanted an object"),
        (["model", "vocab"], {"a": 2**40}, "wanted an object"),
        (["model", "vocab"], {"a": "0"}, "wanted an object"),
        (["model", "unk_token"], "<nowhere>", "wanted a token of the vocabulary"),
        (["model", "merges"], None, "wanted a list"),
        (["model", "merges"], ["abc"], "wanted pairs"),
        (["model", "merges"], [3], "wanted pairs"),
        (["model", "merges"], [["nothere", "norhere"]], "contradicts itself"),
        (["added_tokens"], {}, None),
        (["added_tokens"], "x", "wanted a list"),
        (["added_tokens"], [3], "wanted a list"),
        (["added_tokens"], [{"id": 3}], "wanted objects with id and content"),
        (["added_tokens"], [{"id": -3, "content": "x"}], "wanted objects with id and content"),
        (["added_tokens"], [{"id": 3, "content": ""}], "wanted objects with id and content"),
        (["pre_tokenizer"], {"type": "Nothing"}, "pre_tokenizer"),
        (["normalizer"], 3, "normalizer"),
        (["post_processor"], {"type": "TemplateProcessing", "single": 3}, "post_processor"),
    ],
)
def test_a_broken_tokenizer_file_is_an_error_that_says_where(
    edit: Edit, write_directory: Write, path: list[str], value: object, message: str | None
) -> None:
    document = edit()
    target = document
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    directory = write_directory(document)
    if message is None:
        assert from_directory(directory).special_tokens == {}
    else:
        with pytest.raises(TokenizerError, match=message):
            from_directory(directory)


def test_an_unknown_spelling_of_bytes_is_an_error(edit: Edit, write_directory: Write) -> None:
    document = edit()
    document["pre_tokenizer"] = document["decoder"] = None
    with pytest.raises(TokenizerError, match="byte-level or SentencePiece"):
        from_directory(write_directory(document))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config", {"eos_token": "<nowhere>"}, "eos_token: wanted a token of the vocabulary"),
        ("tokenizer_config", {"added_tokens_decoder": [1]}, "added_tokens_decoder: wanted an object"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "y"}}}, "wanted objects with id"),
        ("generation_config", {"eos_token_id": "2"}, "wanted a token id or a list"),
        ("generation_config", {"eos_token_id": [True]}, "wanted a token id or a list"),
        ("generation_config", {"eos_token_id": 10**6}, "wanted ids below"),
    ],
)
def test_a_broken_settings_file_is_an_error_that_names_the_key(
    edit: Edit, write_directory: Write, name: str, content: Document, message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        from_directory(write_directory(edit(), **{name: content}))
