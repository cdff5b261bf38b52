"""Added tokens: where they stand in a text, and text that must not be taken for one."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from astrai_triton.errors import ChatTemplateError
from astrai_triton.tokenizer.detokenize import SPACE_MARK

# Word characters that their category does not show: joiners, and letters in circles and squares.
_OTHER_WORD = re.compile(
    "[\u200c\u200d\u24b6-\u24e9\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189]"
)
# Unicode White_Space, as the `tokenizers` package strips it; str.strip() also takes U+001C to U+001F.
_WHITE_SPACE = frozenset("\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000").union(
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
        lengths: dict[str, set[int]] = {}
        for content in self._by_content:
            lengths.setdefault(content[0], set()).add(len(content))
        self._lengths = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        # "(?!)" matches nowhere.
        self._heads = re.compile("|".join(map(re.escape, self._lengths)) or "(?!)")

    @property
    def heads(self) -> Iterable[str]:
        """First characters of the tokens."""
        return self._lengths.keys()

    def longest_at(self, text: str, start: int) -> AddedToken | None:
        """Longest token that begins at ``text[start]``."""
        for length in self._lengths.get(text[start : start + 1], ()):
            token = self._by_content.get(text[start : start + length])
            if token is not None:
                return token
        return None

    def find(self, text: str) -> Iterator[tuple[int, AddedToken]]:
        """Every token with the position at which it begins."""
        at = 0
        while (head := self._heads.search(text, at)) is not None:
            token = self.longest_at(text, head.start())
            if token is not None:
                yield head.start(), token
            at = head.start() + (1 if token is None else len(token.content))

    def split(self, text: str) -> Iterator[str | int]:
        """Cut ``text`` at its added tokens.

        Yields:
            Non-empty text between tokens, and the ids of the tokens, in order.
        """
        done = 0
        for start, token in self.find(text):
            stop = start + len(token.content)
            if token.single_word and (_is_word(text[start - 1 : start]) or _is_word(text[stop : stop + 1])):
                continue
            while token.lstrip and start > done and text[start - 1] in _WHITE_SPACE:
                start -= 1
            while token.rstrip and stop < len(text) and text[stop] in _WHITE_SPACE:
                stop += 1
            if done < start:
                yield text[done:start]
            yield token.id
            done = stop
        if done < len(text):
            yield text[done:]


def _is_word(char: str) -> bool:
    """Whether ``char`` is ``\\w`` as the `tokenizers` package has it (UTS #18, annex C)."""
    if not char:
        return False
    category = unicodedata.category(char)
    return category[0] in "LM" or category in ("Nd", "Nl", "Pc") or _OTHER_WORD.match(char) is not None


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

    In every string of messages and tools, each character that begins some added token gets a stand-in.
    Whatever the template then trims, cuts, joins or re-quotes, a token that appears begins in text of the
    template's own. Two things stay: the role, which some templates put between ``<|`` and ``|>`` to make a
    token (so only known roles may come here), and non-special tokens such as ``<think>`` in the assistant's
    own text, which the model wrote as tokens and templates look for.

    Args:
        tokens: all added tokens but those for white space.
    """

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        self._tokens = ControlTokens(tokens)
        self._taken = frozenset("".join(token.content for token in tokens))

    def cover(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> CoveredChat:
        """Cover one conversation; the arguments are not changed.

        Raises:
            ChatTemplateError: a message is nested too deeply or uses up all rare symbols.
        """
        stand_ins = _StandIns([*_strings(messages), *_strings(tools)], self._taken)

        def cover_all(text: str) -> str:
            for head in self._tokens.heads:
                if head in text:
                    text = text.replace(head, stand_ins[head])
            return text

        def cover_own(text: str) -> str:
            pieces, done = [], 0
            for start, token in self._tokens.find(text):
                if not token.special:
                    pieces += [cover_all(text[done:start]), token.content]
                    done = start + len(token.content)
            return "".join([*pieces, cover_all(text[done:])])

        covered = []
        for message in messages:
            assistant = message["role"] == "assistant"
            copy = {}
            for key, value in message.items():
                change = cover_own if assistant and isinstance(value, str) else cover_all
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
