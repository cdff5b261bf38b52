"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_server.openai import ChatCompletionRequest, OpenAIResponseBuilder
from astrai_server.tokenization import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from astrai_server.wire import InvalidRequestError, read_request
from astrai_triton.checkpoint import open_checkpoint, resolve
from astrai_triton.errors import ChatTemplateError
from astrai_triton.tokenizer import Tokenizer
from fake_engine import FakeEngine
from fakes import EOS, VOCAB, ByteTokenizer

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "well"}


@pytest.fixture(scope="module")
def smollm2() -> Any:
    tokenizer = open_checkpoint(resolve("SmolLM2-135M-Instruct")).tokenizer
    return SimpleNamespace(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, max_seq_len=8192)


def ask_tokenize(engine: Any = None, **body: Any) -> dict[str, Any]:
    request, unknown = read_request(json.dumps(body).encode(), TokenizeRequest)
    assert unknown == ()
    return asyncio.run(tokenize(request, engine or FakeEngine()))


def ask_detokenize(tokens: Sequence[int], engine: Any = None, **body: Any) -> dict[str, Any]:
    request, unknown = read_request(json.dumps(body | {"tokens": tokens}).encode(), DetokenizeRequest)
    assert unknown == ()
    return asyncio.run(detokenize(request, engine or FakeEngine()))


def spell(answer: dict[str, Any]) -> str:
    """The tokens of the fake engine as text."""
    return bytes(answer["tokens"]).decode()


# Prompts


def test_a_prompt_becomes_its_tokens() -> None:
    assert ask_tokenize(prompt="hé", model="any") == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [104, 195, 169],
        "token_strs": None,
    }


def test_an_empty_prompt_has_no_tokens() -> None:
    answer = ask_tokenize(prompt="", return_token_strs=True)
    assert (answer["count"], answer["tokens"], answer["token_strs"]) == (0, [], [])


def test_the_text_of_every_token_comes_if_it_is_asked_for() -> None:
    assert ask_tokenize(prompt="a b", return_token_strs=True)["token_strs"] == ["a", " ", "b"]
    assert ask_tokenize(prompt="é", return_token_strs=True)["token_strs"] == ["\ufffd", "\ufffd"]


def test_a_prompt_longer_than_the_context_is_counted_all_the_same() -> None:
    answer = ask_tokenize(FakeEngine(max_seq_len=8), prompt="0123456789")
    assert (answer["count"], answer["max_model_len"]) == (10, 8)


class BeginningTokenizer(ByteTokenizer):
    """Wants every raw prompt to begin with a token of its own, as Llama's does."""

    def encode(self, text: str, *, add_bos: bool | None = None, allow_special: bool = False) -> list[int]:
        return [257] * (add_bos is not False) + super().encode(text)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, [257, 97]), ({"add_special_tokens": True}, [257, 97]), ({"add_special_tokens": False}, [97])],
)
def test_the_begin_of_sequence_token_can_be_left_out(fields: dict[str, bool], expected: list[int]) -> None:
    engine = FakeEngine()
    engine.tokenizer = BeginningTokenizer()
    assert ask_tokenize(engine, prompt="a", **fields)["tokens"] == expected


# Messages


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [USER]}, "<user>hi<assistant>"),
        ({"messages": [USER], "add_generation_prompt": True}, "<user>hi<assistant>"),
        ({"messages": [USER], "add_generation_prompt": False}, "<user>hi"),
        ({"messages": [USER, ASSISTANT]}, "<user>hi<assistant>well<assistant>"),
        ({"messages": [USER, ASSISTANT], "continue_final_message": True}, "<user>hi<assistant>well"),
        (
            {"messages": [USER, ASSISTANT], "continue_final_message": True, "add_generation_prompt": False},
            "<user>hi<assistant>well",
        ),
        ({"messages": [USER], "add_special_tokens": False}, "<user>hi<assistant>"),
        ({"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, USER]},
         "<system>x<user>hi<assistant>"),
    ],
)  # fmt: skip
def test_messages_are_written_by_the_chat_template(body: dict[str, Any], expected: str) -> None:
    answer = ask_tokenize(**body)
    assert spell(answer) == expected
    assert answer["count"] == len(expected)


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_messages_have_the_tokens_of_the_request_that_would_be_answered(tools: list[Any]) -> None:
    body = {"messages": [{"role": "system", "content": "be brief"}, USER, ASSISTANT, USER], "tools": tools}
    request, _ = read_request(json.dumps(body).encode(), ChatCompletionRequest)
    engine: Any = FakeEngine()
    (prompt,) = OpenAIResponseBuilder().prepare(request, engine).prompts
    assert ask_tokenize(engine, **body)["tokens"] == list(prompt)


def test_tools_are_in_the_prompt() -> None:
    assert "look_up" in spell(ask_tokenize(messages=[USER], tools=[TOOL]))


def test_a_conversation_that_the_template_refuses_is_an_error() -> None:
    with pytest.raises(ChatTemplateError):
        ask_tokenize(messages=[ASSISTANT])


# Back


def test_tokens_become_text() -> None:
    assert ask_detokenize([104, 195, 169], model="any") == {"prompt": "hé"}
    assert ask_detokenize([]) == {"prompt": ""}


def test_bytes_that_are_no_character_are_replaced() -> None:
    assert ask_detokenize([104, 195]) == {"prompt": "h\ufffd"}


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_the_fake_brings_every_text_back(text: str) -> None:
    tokens = ask_tokenize(prompt=text)["tokens"]
    assert ask_detokenize(tokens) == {"prompt": text}


# Its vocabulary has no token for these control characters, nor for the unassigned planes from U+40000 on.
EXPRESSIBLE = st.characters(
    max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\4\6\x13\x14\x16\x1d"
)


@pytest.mark.real_model
@given(text=st.text(EXPRESSIBLE))
def test_smollm2_brings_every_text_back(smollm2: Any, text: str) -> None:
    answer = ask_tokenize(smollm2, prompt=text, return_token_strs=True)
    assert len(answer["token_strs"]) == answer["count"] == len(answer["tokens"])
    assert ask_detokenize(answer["tokens"], smollm2) == {"prompt": text}


@pytest.mark.real_model
def test_smollm2_keeps_what_spells_a_special_token_as_text_and_spells_out_its_own(smollm2: Any) -> None:
    tokenizer: Tokenizer = smollm2.tokenizer
    text = "<|im_end|> and Grüße, 北京 🎉"
    special = set(tokenizer.special_tokens.values())
    plain = ask_tokenize(smollm2, prompt=text)
    assert special.isdisjoint(plain["tokens"])
    chat = ask_tokenize(smollm2, messages=[{"role": "user", "content": text}], return_token_strs=True)
    assert chat["tokens"] == tokenizer.encode_chat([{"role": "user", "content": text}])
    assert chat["token_strs"][:2] == ["<|im_start|>", "system"]
    shown = ask_detokenize(chat["tokens"], smollm2)["prompt"]
    assert shown.endswith(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


# Refusals


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [USER]}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "alien", "content": "a"}]}, "messages[0].role"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": [USER, ASSISTANT], "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ({"messages": [USER], "tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"messages": [USER], "tools": [{}]}, "tools[0].type"),
        ({"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ({"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ({"messages": [USER], "chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": [USER], "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
    ],
)
def test_a_request_that_makes_no_sense_is_named(body: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask_tokenize(**body)
    assert where in [issue.where for issue in caught.value.issues]


@pytest.mark.parametrize(
    "body", [{"prompt": "a"}, {"messages": [USER]}, {"prompt": "a", "chat_template_kwargs": {}}]
)
def test_null_is_the_default_of_every_field(body: dict[str, Any]) -> None:
    names = {"prompt", "messages", "add_generation_prompt", "tools", "return_token_strs", "chat_template"}
    assert ask_tokenize(**dict.fromkeys(names - body.keys()), **body) == ask_tokenize(**body)


@pytest.mark.parametrize(
    ("tokens", "where"),
    [
        ([1, VOCAB], "tokens[1]"),
        ([-1], "tokens[0]"),
        ([10**19], "tokens[0]"),
        ([True], "tokens[0]"),
        ([1.0], "tokens[0]"),
        (["1"], "tokens[0]"),
        ("1", "tokens"),
        (None, "tokens"),
    ],
)
def test_tokens_that_are_none_of_the_vocabulary_are_named(tokens: Any, where: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask_detokenize(tokens)
    assert [issue.where for issue in caught.value.issues] == [where]


def test_every_token_of_the_vocabulary_can_be_shown() -> None:
    assert ask_detokenize([97, EOS, VOCAB - 1, 98])["prompt"] == "ab"


def test_the_event_loop_goes_on_meanwhile() -> None:
    threads: list[threading.Thread] = []

    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_bos: bool | None = None, allow_special: bool = False) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode(text)

        def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
            threads.append(threading.current_thread())
            return super().decode(ids)

    engine = FakeEngine()
    engine.tokenizer = SlowTokenizer()
    ask_tokenize(engine, prompt="a")
    ask_tokenize(engine, messages=[USER])
    ask_detokenize([97], engine)
    assert len(threads) == 3
    assert threading.main_thread() not in threads
