"""Finding added tokens in text, and text that must not be taken for one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_triton.errors import ChatTemplateError
from astrai_triton.tokenizer.control import MAX_NESTING, AddedToken, ChatCover, ControlTokens

CONTENTS = ["<|im_start|>", "<|im_end|>", "<|im_end|>!", "<!", "aba", "[INST]", "\u00a4"]
TOKENS = [AddedToken(content=content, id=i) for i, content in enumerate(CONTENTS)]
TOOL_CALL = AddedToken(content="<tool_call>", id=len(TOKENS), special=False)
FRAGMENTS = st.one_of(
    st.sampled_from(
        ["<", "|", "<|im", "_end", "|>", "ab", "a", "b", "[INST", "]", "\U0001d300", "\u00a4", *CONTENTS]
    ),
    st.text(max_size=3),
)
TEXTS = st.lists(FRAGMENTS, max_size=8).map("".join)
# A token cut in two or three, its parts in neighbouring texts.
CUT_TOKENS = st.builds(
    lambda content, first, second: [content[:first], content[first:second], content[second:]],
    st.sampled_from(CONTENTS),
    st.integers(0, 6),
    st.integers(6, 12),
)
NEIGHBOURS = st.lists(CUT_TOKENS | TEXTS.map(lambda text: [text]), max_size=4).map(
    lambda groups: list(itertools.chain.from_iterable(groups))
)


def split(text: str, *tokens: AddedToken) -> list[str | int]:
    return list(ControlTokens(tokens or TOKENS).split(text))


def test_the_longest_token_wins() -> None:
    assert split("x<|im_end|>y<|im_end|>!<|z<!") == ["x", 1, "y", 2, "<|z", 3]


def test_overlapping_tokens_count_from_the_left() -> None:
    assert split("ababa") == [4, "ba"]


def test_text_without_tokens_is_one_piece_and_no_text_is_none() -> None:
    assert split("a < b") == ["a < b"]
    assert split("") == []


def test_no_added_tokens_find_nothing() -> None:
    assert list(ControlTokens([]).split("<s>")) == ["<s>"]


def test_stripping_tokens_take_white_space_along() -> None:
    token = AddedToken(content="<m>", id=7, lstrip=True, rstrip=True)
    assert split("a  <m> \n<m>\tb ", token) == ["a", 7, 7, "b "]


def test_a_single_word_token_is_not_found_inside_a_word() -> None:
    token = AddedToken(content="tok", id=7, single_word=True)
    assert split("token tok a_tok", token) == ["token ", 7, " a_tok"]


@given(TEXTS)
def test_pieces_and_tokens_joined_are_the_text(text: str) -> None:
    assert "".join(CONTENTS[piece] if isinstance(piece, int) else piece for piece in split(text)) == text


@given(TEXTS)
def test_tokens_are_found_as_a_plain_search_finds_them(text: str) -> None:
    expected, at = [], 0
    while at < len(text):
        found = [content for content in CONTENTS if text.startswith(content, at)]
        expected += [CONTENTS.index(max(found, key=len))] if found else []
        at += max(map(len, found), default=1)
    assert [piece for piece in split(text) if isinstance(piece, int)] == expected


@given(NEIGHBOURS, st.lists(st.slices(20), min_size=1))
def test_covered_texts_never_form_a_token_however_they_are_cut_and_joined(
    texts: list[str], cuts: list[slice]
) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    chat = ChatCover(TOKENS).cover(messages, None)
    joined = "".join(message["content"] for message in chat.messages)
    assert split(joined) == ([joined] if joined else [])
    assert chat.uncover(joined) == "".join(texts)
    assert chat.mark not in "".join(texts)
    cut = "".join(message["content"][cut] for message in chat.messages for cut in cuts)
    assert split(cut) == ([cut] if cut else [])


def test_a_text_that_the_template_completes_to_a_token_is_none() -> None:
    chat = ChatCover(TOKENS).cover([{"role": "user", "content": "x <|im_end"}], None)
    (message,) = chat.messages
    assert split(message["content"] + "|>") == [message["content"] + "|>"]


def test_tool_schemas_and_call_arguments_are_covered_with_their_keys() -> None:
    tools = [{"function": {"name": "f", "enum": ["<|im_end|>", 1, None, True]}}]
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": "[INST]"}}}
    chat = ChatCover(TOKENS).cover([{"role": "assistant", "content": "", "tool_calls": [call]}], tools)
    seen = f"{chat.messages}{chat.tools}"
    assert "<|im_end|>" not in seen
    assert "[INST]" not in seen
    assert chat.uncover(seen).count("<|im_end|>") == 2


def test_the_assistants_own_text_keeps_tokens_that_are_not_special() -> None:
    messages = [{"role": role, "content": "<tool_call><|im_end|>"} for role in ("assistant", "user")]
    chat = ChatCover([*TOKENS, TOOL_CALL]).cover(messages, None)
    assert chat.messages[0]["content"].startswith("<tool_call>")
    assert "<|im_end|>" not in chat.messages[0]["content"]
    assert "<tool_call>" not in chat.messages[1]["content"]


def test_the_conversation_given_is_not_changed() -> None:
    messages = [{"role": "user", "content": "<|im_end|>", "extra": ["<!"]}]
    ChatCover(TOKENS).cover(messages, None)
    assert messages == [{"role": "user", "content": "<|im_end|>", "extra": ["<!"]}]


def test_too_deep_a_message_is_refused() -> None:
    nested: list[object] = []
    for _ in range(MAX_NESTING + 10):
        nested = [nested]
    with pytest.raises(ChatTemplateError, match="levels deep"):
        ChatCover(TOKENS).cover([{"role": "user", "content": "", "extra": nested}], None)


@pytest.mark.parametrize(
    ("content", "special", "expected"),
    [("▁▁", False, True), ("\n\n", False, True), ("\n", True, False), ("<b>", False, False)],
)
def test_only_white_space_that_is_not_special_counts_as_text(
    content: str, special: bool, expected: bool
) -> None:
    assert AddedToken(content=content, id=0, special=special).is_white_space is expected


def test_symbols_that_the_conversation_uses_do_not_stand_in() -> None:
    text = "\U0001d300\U0001d301 <|im_end|>"
    chat = ChatCover(TOKENS).cover([{"role": "user", "content": text}], None)
    covered = chat.messages[0]["content"]
    assert covered.startswith("\U0001d300\U0001d301 ")
    assert chat.uncover(covered) == text


def test_a_conversation_with_every_rare_symbol_is_refused() -> None:
    text = "".join(map(chr, (*range(0x1D300, 0x1D357), *range(0x13000, 0x1342F))))
    with pytest.raises(ChatTemplateError, match="rare symbols"):
        ChatCover(TOKENS).cover([{"role": "user", "content": text}], None)
