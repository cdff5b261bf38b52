"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tokenizers import normalizers

from astrai_triton.errors import TokenizerError
from astrai_triton.tokenizer.build import (
    Vocabulary,
    build_plain,
    declare_special,
    make_tokenizer,
    spell,
)
from astrai_triton.tokenizer.chat import ChatTemplate
from astrai_triton.tokenizer.control import AddedToken
from astrai_triton.tokenizer.detokenize import SPACE_MARK, byte_level_bytes, sentencepiece_bytes
from astrai_triton.tokenizer.splitting import find_splitting
from astrai_triton.tokenizer.tokenizer import Tokenizer

# tokenizer.ggml.token_type, as the GGUF specification numbers them.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_USED = (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)

_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {"text": (str,), "integer": (int,), "number": (int, float)}
)

# Phi-3's control tokens swallow the white space after them, but for these. GGUF has no field for it.
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Args:
        metadata: the file's keys with plain Python values: ``tokenizer.ggml.*``,
            ``tokenizer.chat_template*`` and ``general.architecture``; others are not looked at.

    Raises:
        TokenizerError: keys are missing, contradict each other, or name a tokenizer that is not implemented.
        ChatTemplateError: the chat template is not valid Jinja.
    """
    fields = _Fields(metadata)
    if fields.kind == "gpt2":
        return _from_byte_level(fields)
    return _from_sentencepiece(fields)


class _Fields:
    """The metadata, checked for type and length."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.kind = metadata.get("tokenizer.ggml.model")
        if self.kind not in ("gpt2", "llama"):
            raise TokenizerError(
                "tokenizer.ggml.model: wanted 'gpt2' (byte-level BPE) or 'llama' (SentencePiece BPE), "
                f"got {self.kind!r}; other kinds are not implemented"
            )
        self.tokens: list[str] = self.array("tokens", "text")
        if not self.tokens:
            raise TokenizerError("tokenizer.ggml.tokens: wanted at least one token, got none")
        self.types: list[int] = self.array("token_type", "integer", [_NORMAL] * len(self.tokens))
        if len(self.types) != len(self.tokens):
            raise TokenizerError(
                f"tokenizer.ggml.token_type: wanted one per token ({len(self.tokens)}), got {len(self.types)}"
            )
        if self.kind == "llama":
            # Gemma's vocabulary has runs of white space as user-defined tokens, looked for in the raw text.
            for index, kind in enumerate(self.types):
                if kind == _USER_DEFINED:
                    text = self.tokens[index].replace(SPACE_MARK, " ")
                    self.tokens[index] = text if text.isspace() else self.tokens[index]
        self.bos_id = self.token_id("bos_token_id")
        self.eos_id = self.token_id("eos_token_id")
        self.unknown_id = self.token_id("unknown_token_id")
        ends = (self.eos_id, self.token_id("eot_token_id"), self.token_id("eom_token_id"))
        self.stop_ids = [token_id for token_id in ends if token_id is not None]

    def array(self, name: str, kind: str, default: list[Any] | None = None) -> list[Any]:
        """``tokenizer.ggml.<name>`` as a list, every value of the kind named."""
        values = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if values is None:
            raise TokenizerError(
                f"tokenizer.ggml.{name}: missing; a {self.kind!r} tokenizer cannot do without"
            )
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
            raise TokenizerError(f"tokenizer.ggml.{name}: wanted an array, got {type(values).__name__}")
        wrong = next(
            (index for index, value in enumerate(values) if not isinstance(value, _TYPES[kind])), None
        )
        if wrong is not None:
            raise TokenizerError(f"tokenizer.ggml.{name}[{wrong}]: wanted {kind}, got {values[wrong]!r}")
        return list(values)

    def token_id(self, name: str) -> int | None:
        """``tokenizer.ggml.<name>`` as an id within the vocabulary."""
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise TokenizerError(
                f"tokenizer.ggml.{name}: wanted a token id below {len(self.tokens)}, got {value!r}"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """``tokenizer.ggml.<name>`` as a bool."""
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise TokenizerError(f"tokenizer.ggml.{name}: wanted true or false, got {value!r}")
        return value

    def splitting_name(self) -> Any:
        """``tokenizer.ggml.pre``."""
        return self._metadata.get("tokenizer.ggml.pre")

    def added(self) -> tuple[AddedToken, ...]:
        """Tokens that are looked for as strings."""
        strips = self.kind == "llama" and self._metadata.get("general.architecture") == "phi3"
        found = []
        for token_id, (content, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and content:
                special = kind != _USER_DEFINED
                rstrip = strips and special and content not in _PHI3_KEEPS_SPACE
                found.append(AddedToken(content=content, id=token_id, special=special, rstrip=rstrip))
        named = {
            token_id: self.tokens[token_id]
            for token_id in (self.bos_id, *self.stop_ids)
            if token_id is not None
        }
        return declare_special(found, named)

    def chat_template(self) -> ChatTemplate | None:
        """The default template, with the one for tools where the file has both."""
        source = self._metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        special = {"bos_token": self.bos_id, "eos_token": self.eos_id, "unk_token": self.unknown_id}
        return ChatTemplate(
            source,
            tool_source=self._metadata.get("tokenizer.chat_template.tool_use"),
            special_tokens={name: self.tokens[i] for name, i in special.items() if i is not None},
        )


def _from_byte_level(fields: _Fields) -> Tokenizer:
    splitting = find_splitting(fields.splitting_name())
    merges = [tuple(pair.split(" ")) for pair in fields.array("merges", "text")]
    wrong = next((pair for pair in merges if len(pair) != 2), None)
    if wrong is not None:
        raise TokenizerError(
            f"tokenizer.ggml.merges: wanted two tokens and a space in each, got {' '.join(wrong)!r}"
        )
    unused = {i for i, kind in enumerate(fields.types) if kind not in _USED}
    vocab = Vocabulary(
        tokens={token: i for i, token in enumerate(fields.tokens) if i not in unused},
        merges=merges,
        added=fields.added(),
        ignore_merges=splitting.ignore_merges,
    )
    normalizer = None if splitting.normalizer is None else splitting.normalizer()
    (plain,) = build_plain(vocab, normalizer, splitting.build())
    return make_tokenizer(
        vocab=vocab,
        first=plain,
        later=plain,
        token_bytes=spell(vocab, byte_level_bytes, len(fields.tokens)),
        bos_id=fields.bos_id,
        add_bos=fields.bos_id is not None and fields.flag("add_bos_token", splitting.add_bos),
        declared_stops=fields.stop_ids,
        chat_template=fields.chat_template(),
    )


def _from_sentencepiece(fields: _Fields) -> Tokenizer:
    scores = fields.array("scores", "number")
    if len(scores) != len(fields.tokens):
        raise TokenizerError(
            f"tokenizer.ggml.scores: wanted one per token ({len(fields.tokens)}), got {len(scores)}"
        )
    tokens, types = fields.tokens, fields.types
    unknown_id = fields.unknown_id
    if unknown_id is None:
        unknown_id = next((i for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    keeps_unknown = unknown_id is not None and unknown_id not in (fields.bos_id, *fields.stop_ids)
    unused = {i for i, kind in enumerate(types) if kind not in _USED}
    vocab = Vocabulary(
        tokens={token: i for i, token in enumerate(tokens) if i not in unused},
        merges=_merges_by_score({tokens[i]: scores[i] for i, kind in enumerate(types) if kind == _NORMAL}),
        added=fields.added(),
        unknown=tokens[unknown_id] if keeps_unknown and unknown_id is not None else None,
        byte_fallback=_BYTE in types,
        fuse_unknown=True,
    )
    to_mark = normalizers.Replace(" ", SPACE_MARK)
    # A space goes before the text and, as these models were trained, after every control token.
    with_prefix = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), to_mark])
    (plain,) = build_plain(vocab, with_prefix if fields.flag("add_space_prefix", True) else to_mark, None)
    return make_tokenizer(
        vocab=vocab,
        first=plain,
        later=plain,
        token_bytes=spell(
            vocab, sentencepiece_bytes, len(tokens), () if unknown_id is None else [unknown_id]
        ),
        bos_id=fields.bos_id,
        add_bos=fields.bos_id is not None and fields.flag("add_bos_token", True),
        declared_stops=fields.stop_ids,
        chat_template=fields.chat_template(),
    )


def _merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges that build the best-scored piece first, which is what SentencePiece does."""
    merges = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                merges.append((left, right))
    return merges
