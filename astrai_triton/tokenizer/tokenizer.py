"""The tokenizer as the engine and the server see it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tokenizers

from astrai_triton.errors import ChatTemplateError
from astrai_triton.tokenizer.chat import ChatTemplate, ToolFormat, normalize_messages
from astrai_triton.tokenizer.control import AddedToken, ChatCover, ControlTokens
from astrai_triton.tokenizer.detokenize import Detokenizer, whole_texts


class Tokenizer:
    """Text <-> token ids of one checkpoint. Immutable, for any thread.

    Added tokens are looked for here, not in ``tokenizers``: by default text is only text, and what reads
    like a control token is encoded letter by letter. Characters that the vocabulary cannot express and has
    no unknown token for are left out, as in the checkpoint's own tokenizer.

    Args:
        first: encodes plain text at the start of a prompt; knows no added token but white space.
        later: encodes plain text after a control token; differs where only the first word gets a space.
        added: every added token but those for white space.
        token_bytes: bytes of token ``i`` at index ``i``, special tokens spelled out.
        bos_id: begin-of-sequence token, if there is one.
        add_bos: whether a raw prompt begins with ``bos_id``.
        stop_ids: tokens that end an answer; those in ``added`` are special.
        chat_template: ``None`` where the checkpoint has none.
    """

    def __init__(
        self,
        *,
        first: tokenizers.Tokenizer,
        later: tokenizers.Tokenizer,
        added: Sequence[AddedToken],
        token_bytes: Sequence[bytes],
        bos_id: int | None,
        add_bos: bool,
        stop_ids: frozenset[int],
        chat_template: ChatTemplate | None,
    ) -> None:
        self.vocab_size = len(token_bytes)
        self.bos_id = bos_id
        self.add_bos = add_bos
        self.stop_ids = stop_ids
        self.chat_template = chat_template
        special = {token.content: token.id for token in added if token.special}
        self.special_tokens: Mapping[str, int] = MappingProxyType(special)
        self._first = first
        self._later = later
        self._control = ControlTokens(added)
        self._chat_cover = ChatCover(added)
        self._spelled_bytes = tuple(token_bytes)
        shown = list(token_bytes)
        for token_id in special.values():
            shown[token_id] = b""
        self._shown_bytes = tuple(shown)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the chat template writes calls of tools; see ``ChatTemplate.tool_format``."""
        return None if self.chat_template is None else self.chat_template.tool_format

    @property
    def renders_tools(self) -> bool:
        """Whether conversations with tools, calls and results can be left to the chat template."""
        return self.tool_format is not None

    def encode(self, text: str, *, add_bos: bool | None = None, allow_special: bool = False) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any text without lone surrogates.
            add_bos: begin with ``bos_id``; ``None`` does what the checkpoint says (``self.add_bos``).
            allow_special: strings that spell an added token (``<|im_end|>``, ``<tool_call>``) become that
                token. Never for text from outside.

        Raises:
            TypeError: ``text`` is not a string.
            ValueError: ``text`` has lone surrogates, or ``add_bos`` is asked for and there is no such token.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: wanted a string, got {type(text).__name__}")
        wants_bos = self.add_bos if add_bos is None else add_bos
        if wants_bos and self.bos_id is None:
            raise ValueError("add_bos: this checkpoint has no begin-of-sequence token; pass add_bos=False")
        ids = self._encode_pieces(self._control.split(text) if allow_special else [text])
        return [self.bos_id, *ids] if wants_bos and self.bos_id is not None else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation as the checkpoint's chat template writes it.

        Control tokens come from the template only; the same strings inside messages and tools stay text.
        Content may be ``None`` or a list of text parts. The begin-of-sequence token is there if the template
        writes it.

        Args:
            messages: role and content of each turn, oldest first.
            add_generation_prompt: end with the opening of an assistant turn.
            continue_final: the last message is the assistant's and unfinished: end with its last character.
                Overrules ``add_generation_prompt``.
            tools: JSON schemas of the functions the model may call.

        Raises:
            ChatTemplateError: there is no chat template, or it refused the conversation.
            TypeError: a message is not a mapping.
            ValueError: a text has lone surrogates.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "this checkpoint has no chat template, so it takes raw prompts only, not conversations"
            )
        chat = self._chat_cover.cover(normalize_messages(messages), tools)
        if continue_final:
            text = self.chat_template.render_continued(chat.messages, mark=chat.mark, tools=chat.tools)
        else:
            text = self.chat_template.render(
                chat.messages, add_generation_prompt=add_generation_prompt, tools=chat.tools
            )
        pieces = self._control.split(text)
        return self._encode_pieces(
            piece if isinstance(piece, int) else chat.uncover(piece) for piece in pieces
        )

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are no character become U+FFFD, ids outside the vocabulary nothing.

        A leading space is kept, also the one that SentencePiece puts before the first word of a text.

        Args:
            ids: token ids.
            skip_special: leave special tokens out instead of spelling them.
        """
        table = self._shown_bytes if skip_special else self._spelled_bytes
        size = self.vocab_size
        return b"".join([table[i] for i in ids if 0 <= i < size]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that ``token_id`` adds to the text; none for special tokens and unknown ids."""
        return self._shown_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one answer."""
        return Detokenizer(self._shown_bytes, self._whole_texts)

    def _encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        ids: list[int] = []
        plain = self._first
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                try:
                    ids += plain.encode(piece, add_special_tokens=False).ids
                except TypeError as error:
                    # A string that is not UTF-8 is no string to the Rust side.
                    raise ValueError("text: has lone surrogates; replace them by U+FFFD") from error
            plain = self._later
        return ids

    @functools.cached_property
    def _whole_texts(self) -> Sequence[str | None]:
        # Two threads that come first at once compute the same twice.
        return tuple(whole_texts(self._shown_bytes))
