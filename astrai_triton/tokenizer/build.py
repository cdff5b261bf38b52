"""What both kinds of checkpoint share: from a vocabulary to a `Tokenizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import tokenizers

from astrai_triton.errors import ChatTemplateError, TokenizerError
from astrai_triton.tokenizer.chat import ChatTemplate
from astrai_triton.tokenizer.control import AddedToken, ControlTokens
from astrai_triton.tokenizer.tokenizer import Tokenizer

# Special tokens of these names end a text in every model that has them, whatever its files say.
_END_OF_TEXT = frozenset(["<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<｜end▁of▁sentence｜>"])


@attrs.frozen(kw_only=True, eq=False)
class Vocabulary:
    """A byte-pair vocabulary and the strings around it, as plain values."""

    tokens: Mapping[str, int]
    """Spelling -> id of every token, added ones too."""
    merges: Sequence[tuple[str, str]]
    """Pairs in the order in which they are merged."""
    added: Sequence[AddedToken]
    unmergeable: frozenset[str] = frozenset()
    """Further spellings that text must not become, e.g. ``<0x0A>``."""
    unknown: str | None = None
    """Token of characters that nothing else expresses."""
    byte_fallback: bool = False
    """Characters outside the vocabulary become ``<0xNN>`` tokens."""
    fuse_unknown: bool = False
    ignore_merges: bool = False
    """A word that is a token is that token, however the merges would get there."""


def build_plain(
    vocab: Vocabulary,
    normalizer: tokenizers.normalizers.Normalizer | None,
    *pre_tokenizers: tokenizers.pre_tokenizers.PreTokenizer | None,
) -> list[tokenizers.Tokenizer]:
    """Tokenizers that know no added token but white space, so that no text can become one.

    Args:
        vocab: vocabulary and merges.
        normalizer: applied to the text first.
        pre_tokenizers: one per tokenizer wanted; all of them share one model.

    Raises:
        TokenizerError: the merges name tokens that do not exist.
    """
    white_space = {token.content: token for token in vocab.added if token.is_white_space}
    control = {token.content for token in vocab.added} - white_space.keys() - {vocab.unknown}
    tokens = {spelling: i for spelling, i in vocab.tokens.items() if spelling not in control}
    tokens.update((content, token.id) for content, token in white_space.items())
    banned = control | vocab.unmergeable | ({vocab.unknown} if vocab.unknown else set())
    merges = [pair for pair in vocab.merges if pair[0] + pair[1] not in banned and banned.isdisjoint(pair)]
    try:
        model = tokenizers.models.BPE(
            vocab=tokens,
            merges=merges,
            unk_token=vocab.unknown,
            byte_fallback=vocab.byte_fallback,
            fuse_unk=vocab.fuse_unknown,
            ignore_merges=vocab.ignore_merges,
        )
    except Exception as error:
        raise TokenizerError(f"the vocabulary contradicts itself: {error}") from error
    built = []
    for pre_tokenizer in pre_tokenizers:
        plain = tokenizers.Tokenizer(model)
        if normalizer is not None:
            plain.normalizer = normalizer
        if pre_tokenizer is not None:
            plain.pre_tokenizer = pre_tokenizer
        for token in white_space.values():
            flags = attrs.asdict(
                token, filter=lambda field, _: field.name not in ("content", "id", "special")
            )
            plain.add_tokens([tokenizers.AddedToken(token.content, **flags)])
        built.append(plain)
    return built


def spell(
    vocab: Vocabulary, to_bytes: Callable[[str], bytes], size: int, silent: Iterable[int] = ()
) -> list[bytes]:
    """Bytes of every token, by id.

    Args:
        vocab: ids may have holes; those decode to nothing.
        to_bytes: bytes of an ordinary token's spelling. Added tokens spell themselves.
        size: 1 + the highest id.
        silent: ids that decode to nothing, e.g. the unknown token.
    """
    table = [b""] * size
    for spelling, token_id in vocab.tokens.items():
        table[token_id] = to_bytes(spelling)
    for token in vocab.added:
        content = token.content
        table[token.id] = to_bytes(content) if token.is_white_space else content.encode("utf-8", "replace")
    for token_id in silent:
        table[token_id] = b""
    return table


def declare_special(added: Iterable[AddedToken], named: Mapping[int, str]) -> tuple[AddedToken, ...]:
    """``added`` with every token of ``named`` (id -> spelling) in it and special."""
    by_id = {token.id: token for token in added}
    for token_id, spelling in named.items():
        known = by_id.get(token_id) or AddedToken(content=spelling, id=token_id)
        by_id[token_id] = attrs.evolve(known, special=True)
    return tuple(by_id[token_id] for token_id in sorted(by_id))


def find_stop_ids(
    declared: Iterable[int], added: Sequence[AddedToken], chat_template: ChatTemplate | None
) -> frozenset[int]:
    """Tokens that end an answer.

    Args:
        declared: what the checkpoint's files say.
        added: special tokens with a known end-of-text name are taken from here.
        chat_template: gives the token that it writes after an assistant message.
    """
    stops = set(declared)
    stops.update(token.id for token in added if token.special and token.content in _END_OF_TEXT)
    end_of_turn = None if chat_template is None else _find_end_of_turn(chat_template, ControlTokens(added))
    if end_of_turn is not None:
        stops.add(end_of_turn)
    return frozenset(stops)


def _find_end_of_turn(chat_template: ChatTemplate, control: ControlTokens) -> int | None:
    """Added token that the template writes right after what the assistant said, if any."""
    mark = "\ufdd0"
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"Hello{mark}"}]
    try:
        text = chat_template.render(conversation, add_generation_prompt=False)
    except ChatTemplateError:
        # It takes other conversations than this one; its end of turn is then among the declared ids.
        return None
    _, found, after = text.rpartition(mark)
    token = control.longest_at(after.lstrip(), 0) if found else None
    return None if token is None else token.id


def make_tokenizer(
    *,
    vocab: Vocabulary,
    first: tokenizers.Tokenizer,
    later: tokenizers.Tokenizer,
    token_bytes: Sequence[bytes],
    bos_id: int | None,
    add_bos: bool,
    declared_stops: Iterable[int],
    chat_template: ChatTemplate | None,
) -> Tokenizer:
    """Put the parts together; the arguments are those of `Tokenizer` and `find_stop_ids`."""
    added = [token for token in vocab.added if not token.is_white_space]
    stop_ids = find_stop_ids(declared_stops, added, chat_template)
    return Tokenizer(
        first=first,
        later=later,
        added=[attrs.evolve(token, special=token.special or token.id in stop_ids) for token in added],
        token_bytes=token_bytes,
        bos_id=bos_id,
        add_bos=add_bos,
        stop_ids=stop_ids,
        chat_template=chat_template,
    )
