"""``/tokenize`` and ``/detokenize``: what a text or a conversation is in tokens, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import attrs

from astrai_server.builder import check_token_ids
from astrai_server.conversation import encode_conversation
from astrai_server.field import not_yet, refuse
from astrai_server.openai.frame import TokenSpeller, spell_token
from astrai_server.openai.message import ChatMessage
from astrai_server.openai.tool import ToolDefinition, distinct_tools

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine


@attrs.frozen(kw_only=True)
class TokenizeRequest:
    """Body of ``POST /tokenize``: a prompt or messages.

    Raises:
        InvalidRequestError: none of the two is given or both are, or fields contradict each other.
    """

    prompt: str | None = None
    """Text, taken without a chat template. What spells a special token in it stays text."""
    messages: tuple[ChatMessage, ...] | None = None
    """A conversation, written by the chat template."""
    add_special_tokens: bool = True
    """Begin a prompt as the checkpoint wants it, e.g. with its begin-of-sequence token. Messages have the
    special tokens that the chat template writes."""
    add_generation_prompt: bool | None = None
    """End messages with the opening of the answer; None does, unless the last message goes on."""
    continue_final_message: bool = False
    """The last message is the assistant's, and unfinished."""
    tools: tuple[ToolDefinition, ...] = attrs.field(default=(), validator=distinct_tools)
    """What the model may call, beside messages."""
    return_token_strs: bool = False
    """Answer with the text of every token, too."""
    chat_template: Any = attrs.field(default=None, validator=not_yet())
    chat_template_kwargs: Any = attrs.field(default=None, validator=not_yet({}))
    mm_processor_kwargs: Any = attrs.field(default=None, validator=not_yet({}))

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"model"})

    def __attrs_post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            refuse("prompt", f"wanted prompt or messages, got {'none' if self.prompt is None else 'both'}")
        if self.messages is not None and not self.messages:
            refuse("messages", "wanted at least one item, got an empty list")
        if self.prompt is not None:
            for name in ("tools", "continue_final_message"):
                if getattr(self, name):
                    refuse(name, "belongs to messages, got it beside a prompt; leave it out")
        if self.continue_final_message and self.add_generation_prompt:
            message = (
                "wanted false where continue_final_message is true: a message that goes on opens no other"
            )
            refuse("add_generation_prompt", message)


@attrs.frozen(kw_only=True)
class DetokenizeRequest:
    """Body of ``POST /detokenize``."""

    tokens: tuple[int, ...]

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"model"})


class TokenCodec(TokenSpeller, Protocol):
    """What is asked of the engine's tokenizer."""

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]: ...


async def tokenize(request: TokenizeRequest, engine: InferenceEngine) -> dict[str, Any]:
    """Tokenise, outside of the event loop. Characters that no token expresses are left out.

    Returns:
        The body of the answer: ``count`` of ``tokens``, ``token_strs`` (the text of each; bytes that are no
        whole character are U+FFFD there) if asked for, and ``max_model_len``, which nothing is cut to.

    Raises:
        ChatTemplateError: the chat template refused the conversation.
        InvalidRequestError: a text that cannot be tokenised.
    """
    return await asyncio.to_thread(_tokenize, request, engine)


async def detokenize(request: DetokenizeRequest, engine: InferenceEngine) -> dict[str, Any]:
    """Decode, outside of the event loop. Special tokens are spelled out.

    Returns:
        The body of the answer: ``prompt``, the text; bytes that are no character are U+FFFD.

    Raises:
        InvalidRequestError: a token outside of the vocabulary.
    """
    return await asyncio.to_thread(_detokenize, request, engine)


def _tokenize(request: TokenizeRequest, engine: InferenceEngine) -> dict[str, Any]:
    codec = cast(TokenCodec, engine.tokenizer)
    if request.messages is not None:
        token_ids = _encode_messages(request.messages, request, engine)
    else:
        # None leaves the choice to the checkpoint.
        add_bos = None if request.add_special_tokens else False
        token_ids = codec.encode(request.prompt or "", add_bos=add_bos)
    texts = [spell_token(codec, token_id)[0] for token_id in token_ids] if request.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": engine.max_seq_len,
        "tokens": token_ids,
        "token_strs": texts,
    }


def _encode_messages(
    messages: Sequence[ChatMessage], request: TokenizeRequest, engine: InferenceEngine
) -> list[int]:
    return encode_conversation(
        engine,
        [message.as_turn() for message in messages],
        tools=[tool.as_tool() for tool in request.tools],
        continue_final=request.continue_final_message,
        add_generation_prompt=request.add_generation_prompt is not False,
    )


def _detokenize(request: DetokenizeRequest, engine: InferenceEngine) -> dict[str, Any]:
    check_token_ids("tokens", request.tokens, engine.vocab_size)
    codec = cast(TokenCodec, engine.tokenizer)
    return {"prompt": codec.decode(request.tokens, skip_special=False)}
