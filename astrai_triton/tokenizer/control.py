"""Added tokens: where they stand in a text, and text that must not be taken for one."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from astrai_triton.errors import ChatTemplateError
from astrai_triton.tokenizer.detokenize import SPACE_MARK

# Unicode White_Space, as the `tokenizers` package strips it; str.strip() also takes U+001C to U+001F.
_WHITE_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)

STAND_INS = "\U0001d300-\U0001d356\U00013000-\U0001342e"
"""Characters that may stand in for others, as a range of a regular expression.

Tai Xuan Jing symbols and hieroglyphs: hardly ever used, without upper case, and printable, so that ``repr``
and with it a template that writes out a list leaves them as they are.
"""
_STAND_IN_POOL = "".join(map(chr, (*range(0x1D300, 0x1D357), *range(0x13000, 0x1342F))))

MAX_NESTING = 100
"""Deepest structure inside a message or a tool."""


@attrs.frozen(kw_only=True)
class AddedToken:
    """A token that is found as a string, before the text is split for BPE."""

    content: str = attrs.field(validator=attrs.validators.min_len(1))
    id: int = attrs.field(validator=attrs.validators.ge(0))
    special: bool = True
    """Never shown: decodes to nothing. The others (``<tool_call>``) are text that the model may write."""
    lstrip: bool = False
    """Takes the white space before it along."""
    rstrip: bool = False
    """Takes the white space after it along."""
    single_word: bool = False
    """Only counts between non-word characters."""
    normalized: bool = False
    """Looked for after normalisation; only honoured for white-space tokens."""

    @property
    def is_white_space(self) -> bool:
        """Whether it only stands for white space, as in Gemma's vocabulary: then it is plain text."""
        return not self.special and self.content.replace(SPACE_MARK, " ").isspace()


class ControlTokens:
    """Finds added tokens in text: leftmost, then longest, not overlapping. Immutable."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._by_content = {token.content: token for token in tokens}
        self._sorted = sorted(self._by_content)
        lengths: dict[str, set[int]] = {}
        for content in self._sorted:
            lengths.setdefault(content[0], set()).add(len(content))
        self._lengths = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        self._max_len = max(map(len, self._sorted), default=0)
        # "(?!)" matches nowhere.
        self._heads = re.compile("|".join(map(re.escape, self._lengths)) or "(?!)")

    def longest_at(self, text: str, start: int) -> AddedToken | None:
        """Longest token that begins at ``text[start]``."""
        for length in self._lengths.get(text[start : start + 1], ()):
            token = self._by_content.get(text[start : start + length])
            if token is not None:
                return token
        return None

    def split(self, text: str) -> Iterator[str | int]:
        """Cut ``text`` at its added tokens.

        Yields:
            Non-empty text between tokens, and the ids of the tokens, in order.
        """
        done = at = 0
        while (head := self._heads.search(text, at)) is not None:
            start = head.start()
            token = self.longest_at(text, start)
            if token is None:
                at = start + 1
                continue
            at = stop = start + len(token.content)
            if token.single_word and (_is_word(text[start - 1 : start]) or _is_word(text[stop : stop + 1])):
                continue
            if token.lstrip:
                start = done + len(text[done:start].rstrip(_WHITE_SPACE))
            if token.rstrip:
                at = stop = len(text) - len(text[stop:].lstrip(_WHITE_SPACE))
            if done < start:
                yield text[done:start]
            yield token.id
            done = stop
        if done < len(text):
            yield text[done:]

    def cover(self, text: str, stand_ins: Mapping[str, str]) -> str:
        """Replace the first character of every token in ``text``, overlapping ones too, by its stand-in.

        The end of ``text`` counts as a token if more text could complete it.
        """
        pieces, done = [], 0
        for head in self._heads.finditer(text):
            start = head.start()
            if self.longest_at(text, start) is not None or self._is_cut_off(text, start):
                pieces += [text[done:start], stand_ins[text[start]]]
                done = start + 1
        if not pieces:
            return text
        return "".join([*pieces, text[done:]])

    def _is_cut_off(self, text: str, start: int) -> bool:
        if len(text) - start >= self._max_len:
            return False
        tail = text[start:]
        first = bisect_left(self._sorted, tail)
        return first < len(self._sorted) and self._sorted[first].startswith(tail)


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


class _StandIns(dict[str, str]):
    """Character -> what stands in for it in this conversation, chosen when first asked for."""

    def __init__(self, strings: Sequence[str], taken: Container[str]) -> None:
        super().__init__()
        self._free = (
            char for char in _STAND_IN_POOL if char not in taken and not any(char in text for text in strings)
        )

    def choose(self) -> str:
        """One more character that occurs nowhere."""
        char = next(self._free, None)
        if char is None:
            raise ChatTemplateError(
                "messages: so many rare symbols that none is left to mark control tokens with"
            )
        return char

    def __missing__(self, char: str) -> str:
        self[char] = stand_in = self.choose()
        return stand_in


@attrs.frozen(eq=False)
class CoveredChat:
    """A conversation in which no message spells a control token."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    mark: str
    """A character that occurs nowhere in the conversation."""
    _stand_ins: _StandIns

    def uncover(self, text: str) -> str:
        """Put the characters back."""
        for char, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, char)
        return text


class ChatCover:
    """Keeps text inside messages from becoming control tokens when the template has joined it all.

    Every string in messages and tools that spells an added token, or ends in the beginning of one, gets a
    stand-in for the token's first character: the template may then trim, join and re-quote it, and no token
    appears that the template did not write itself. Two things stay: the role, which some templates put
    between ``<|`` and ``|>`` to make a token (so only known roles may come here), and non-special tokens such
    as ``<think>`` in the assistant's own text, which the model wrote as tokens and templates look for.

    Args:
        tokens: all added tokens but those for white space.
    """

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        self._all = ControlTokens(tokens)
        self._special = ControlTokens(token for token in tokens if token.special)
        self._taken = frozenset("".join(token.content for token in tokens))

    def cover(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> CoveredChat:
        """Cover one conversation; the arguments are not changed.

        Raises:
            ChatTemplateError: a message is nested too deeply or uses up all rare symbols.
        """
        stand_ins = _StandIns([*_strings(messages), *_strings(tools)], self._taken)

        def cover_all(text: str) -> str:
            return self._all.cover(text, stand_ins)

        def cover_special(text: str) -> str:
            return self._special.cover(text, stand_ins)

        covered = []
        for message in messages:
            assistant = message["role"] == "assistant"
            copy = {}
            for key, value in message.items():
                own_text = assistant and isinstance(value, str)
                change = cover_special if own_text else cover_all
                copy[_map(key, cover_all)] = value if key == "role" else _map(value, change)
            covered.append(copy)
        covered_tools = None if tools is None else _map(tools, cover_all)
        return CoveredChat(covered, covered_tools, stand_ins.choose(), stand_ins)


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        if depth > MAX_NESTING:
            raise ChatTemplateError(f"messages: nested more than {MAX_NESTING} levels deep")
        if isinstance(value, Mapping):
            yield from _strings(list(value), depth)
            value = list(value.values())
        for item in value:
            yield from _strings(item, depth + 1)


def _map(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of ``value`` with every string in it changed; ``_strings`` has bounded its depth."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map(key, change): _map(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(item, change) for item in value]
    return value
