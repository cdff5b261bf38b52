"""How text is cut into words before merging."""

from __future__ import annotations

import pytest
from tokenizers import pre_tokenizers

from astrai_triton.errors import TokenizerError
from astrai_triton.tokenizer.splitting import SPLITTINGS, find_splitting

TEXT = "I'LL don't  pay 12345€,\r\n\n XMLHttp naïve日本½"


def words(name: str, text: str) -> list[str]:
    pieces = SPLITTINGS[name].build().pre_tokenize_str(text)
    return [text[start:stop] for _, (start, stop) in pieces]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("gpt-2", ["12345"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["123", "45"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("tekken", ["1", "2", "3", "4", "5"]),
        ("gpt-4o", ["123", "45"]),
        ("default", ["123", "45"]),
    ],
)
def test_digits_are_grouped_as_the_family_groups_them(name: str, number: list[str]) -> None:
    assert words(name, "12345") == number


@pytest.mark.parametrize("name", SPLITTINGS)
def test_no_character_is_lost(name: str) -> None:
    assert "".join(words(name, TEXT)) == TEXT


@pytest.mark.parametrize("name", ["gpt-2", "smollm"])
def test_gpt2_splits_lower_case_contractions_only(name: str) -> None:
    assert words(name, "I'LL don't") == ["I", "'", "LL", " don", "'t"]


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2"])
def test_newer_families_split_contractions_of_any_case(name: str) -> None:
    assert words(name, "I'LL don't") == ["I", "'LL", " don", "'t"]


def test_punctuation_keeps_its_line_ends_in_newer_families() -> None:
    assert words("llama-bpe", "x,\r\n\n y") == ["x", ",\r\n\n", " y"]
    assert words("gpt-2", "x,\r\n\n y") == ["x", ",", "\r\n\n", " y"]


def test_words_end_where_upper_case_follows_lower_case() -> None:
    assert words("tekken", "getURLFast") == ["get", "URLFast"]
    assert words("gpt-4o", "getURLFast we'd") == ["get", "URLFast", " we'd"]


@pytest.mark.parametrize("name", ["gpt-2", "smollm"])
def test_splitting_agrees_with_the_tokenizers_package(name: str) -> None:
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if name == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    expected = pre_tokenizers.Sequence(steps).pre_tokenize_str(TEXT)
    assert SPLITTINGS[name].build().pre_tokenize_str(TEXT) == expected


@pytest.mark.parametrize("name", ["bloom", "", None, 3])
def test_an_unknown_name_is_refused_with_the_choices(name: object) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre: wanted one of .*llama-bpe.*smollm"):
        find_splitting(name)
