"""Token ids -> bytes -> text, whole characters only."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "\u2581"
"""What SentencePiece writes for a space."""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in character of every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# A stand-in becomes the Latin-1 character of its byte, so that one encode() finishes the job.
_TO_LATIN1 = {ord(char): byte for char, byte in _byte_level_alphabet().items()}
# Latin-1 characters that stand for no byte must not pass for one.
_TO_LATIN1.update({code: 0xFFFD for code in range(256) if code not in _TO_LATIN1})


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level BPE token; one that is not in GPT-2's alphabet stands for its own UTF-8."""
    try:
        return token.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


def sentencepiece_bytes(token: str, space: str = SPACE_MARK) -> bytes:
    """Bytes of a SentencePiece token: ``<0xNN>`` is that byte, the space mark a space.

    Args:
        token: the piece as the vocabulary spells it.
        space: the vocabulary's space mark.
    """
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes([int(byte.group(1), 16)])
    return token.replace(space, " ").encode("utf-8", "replace")


def whole_texts(token_bytes: Sequence[bytes]) -> list[str | None]:
    """Text of every token that is whole characters by itself, ``None`` for the others.

    Args:
        token_bytes: bytes of token ``i`` at index ``i``.
    """
    texts: list[str | None] = []
    for data in token_bytes:
        try:
            texts.append(data.decode("utf-8"))
        except UnicodeDecodeError:
            texts.append(None)
    return texts


class Detokenizer:
    """Turns one stream of token ids into text as it comes. For one thread.

    The pieces joined equal the whole byte string decoded with ``errors="replace"``: a character whose bytes
    are not all there yet is held back, bytes that cannot become a character are U+FFFD.

    Args:
        token_bytes: bytes of token ``i`` at index ``i``; ids outside stand for nothing.
        texts: ``whole_texts(token_bytes)``, computed once and shared.
    """

    __slots__ = ("_bytes", "_num_ids", "_pending", "_texts")

    def __init__(self, token_bytes: Sequence[bytes], texts: Sequence[str | None]) -> None:
        self._bytes = token_bytes
        self._texts = texts
        self._num_ids = len(texts)
        self._pending = b""

    def push(self, token_id: int) -> str:
        """Text that became complete with this token; may be empty."""
        if not 0 <= token_id < self._num_ids:
            return ""
        if not self._pending:
            text = self._texts[token_id]
            if text is not None:
                return text
        data = self._pending + self._bytes[token_id]
        text, consumed = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return text

    def flush(self) -> str:
        """Text of what is still held back, as U+FFFD; the stream can go on afterwards as a new one."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text
