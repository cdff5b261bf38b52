"""A tokenizer from a Hugging Face model directory."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from astrai_triton.errors import TokenizerError
from astrai_triton.tokenizer.build import Vocabulary, build_plain, declare_special, make_tokenizer, spell
from astrai_triton.tokenizer.chat import ChatTemplate
from astrai_triton.tokenizer.control import AddedToken
from astrai_triton.tokenizer.detokenize import SPACE_MARK, byte_level_bytes, sentencepiece_bytes
from astrai_triton.tokenizer.tokenizer import Tokenizer

_MAX_VOCAB = 1 << 24
_OTHER_FILES = ("tokenizer.model", "tokenizer.model.v3", "tekken.json", "vocab.json", "tiktoken.model")
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_PIPELINE = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def from_directory(path: Path | str) -> Tokenizer:
    """Build the tokenizer of a model directory.

    Reads ``tokenizer.json`` and, where they exist, ``tokenizer_config.json``, ``special_tokens_map.json``,
    ``generation_config.json`` and ``chat_template.jinja`` or ``.json``. Whatever in ``tokenizer.json``
    decides token ids is used as it stands; nothing is guessed from the name of a tokenizer class.

    Raises:
        TokenizerError: a file is missing, broken or of a kind that is not implemented.
        ChatTemplateError: the chat template is not valid Jinja.
    """
    directory = Path(path)
    main = _MainFile(_find_main(directory))
    settings = _Settings(directory)
    added = {token.id: token for token in (*settings.added(), *main.added())}
    ids = {**main.vocab, **{token.content: token.id for token in added.values()}}
    bos_id, eos_id = settings.named_id("bos_token", ids), settings.named_id("eos_token", ids)
    declared_stops = [*settings.generation_stops(), *([] if eos_id is None else [eos_id])]
    size = 1 + max(ids.values(), default=-1)
    _check_ids({*declared_stops}, size, directory)

    spellings = {token_id: spelling for spelling, token_id in ids.items()}
    special = [token_id for token_id in (bos_id, *declared_stops) if token_id is not None]
    special += [token_id for token_id, token in added.items() if token.content in settings.extra_special()]
    unknown = main.unknown if ids.get(main.unknown or "") not in (bos_id, *declared_stops) else None
    vocab = Vocabulary(
        tokens=main.vocab,
        merges=main.merges(),
        added=declare_special(added.values(), {token_id: spellings[token_id] for token_id in special}),
        unmergeable=_BYTE_TOKENS if main.flag("byte_fallback") else frozenset(),
        unknown=unknown,
        byte_fallback=main.flag("byte_fallback"),
        fuse_unknown=main.flag("fuse_unk"),
        ignore_merges=main.flag("ignore_merges"),
    )
    normalizer, first, later = main.pipeline()
    plain, plain_later = build_plain(vocab, normalizer, first, later)
    return make_tokenizer(
        vocab=vocab,
        first=plain,
        later=plain_later,
        token_bytes=spell(vocab, main.spelling(), size, [ids[main.unknown]] if main.unknown in ids else ()),
        bos_id=bos_id,
        add_bos=bos_id is not None and settings.add_bos(default=main.writes_first(spellings[bos_id])),
        declared_stops=declared_stops,
        chat_template=settings.chat_template(),
    )


class _MainFile:
    """``tokenizer.json``, its structure checked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._root = _read_json(path)
        model = self._root.get("model")
        if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
            kind = model.get("type") if isinstance(model, dict) else None
            raise self.error(f"model.type: wanted 'BPE', got {kind!r}; other kinds are not implemented")
        self._model: dict[str, Any] = model
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            if self._model.get(name):
                raise self.error(
                    f"model.{name}: wanted none, got {self._model[name]!r}; it is not implemented"
                )
        vocab = self._model.get("vocab")
        if not isinstance(vocab, dict) or not all(map(_is_token_id, vocab.values())):
            raise self.error("model.vocab: wanted an object of tokens and their ids")
        self.vocab: dict[str, int] = vocab
        self.unknown: str | None = self._model.get("unk_token") or None
        if self.unknown is not None and self.unknown not in vocab:
            raise self.error(f"model.unk_token: wanted a token of the vocabulary, got {self.unknown!r}")

    def error(self, text: str) -> TokenizerError:
        """An error that names the file."""
        return TokenizerError(f"{self._path}: {text}")

    def flag(self, name: str) -> bool:
        """A switch of the BPE model; absent is off. ``dropout`` is for training and never on here."""
        return bool(self._model.get(name))

    def merges(self) -> list[tuple[str, str]]:
        """Merges of either spelling, ``"a b"`` or ``["a", "b"]``."""
        merges = self._model.get("merges")
        if not isinstance(merges, list):
            raise self.error("model.merges: wanted a list of token pairs")
        pairs = []
        for merge in merges:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if (
                not isinstance(pair, list)
                or len(pair) != 2
                or not all(isinstance(side, str) for side in pair)
            ):
                raise self.error(f"model.merges: wanted pairs of tokens, got {merge!r}")
            pairs.append((pair[0], pair[1]))
        return pairs

    def added(self) -> list[AddedToken]:
        """The added tokens, whitespace ones too."""
        tokens = self._root.get("added_tokens") or []
        if not isinstance(tokens, list) or not all(isinstance(token, dict) for token in tokens):
            raise self.error("added_tokens: wanted a list of objects")
        return [_added_token(token, token.get("id"), self._path) for token in tokens]

    def pipeline(self) -> tuple[Normalizer | None, PreTokenizer | None, PreTokenizer | None]:
        """Normalizer, pre-tokenizer for the start of a text, pre-tokenizer for text after an added token."""
        steps = {part: self._root.get(part) for part in _PIPELINE}
        later = {**steps, "pre_tokenizer": _without_first_space(steps["pre_tokenizer"])}
        built = []
        for parts in (steps, later):
            empty = {"type": "BPE", "vocab": {}, "merges": []}
            try:
                built.append(
                    tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", **parts, "model": empty}))
                )
            except Exception as error:
                raise self.error(f"{', '.join(_PIPELINE)}: {error}") from error
        return built[0].normalizer, built[0].pre_tokenizer, built[1].pre_tokenizer

    def spelling(self) -> Callable[[str], bytes]:
        """How the vocabulary spells bytes."""
        steps = [*_nodes([self._root.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")])]
        if any(step["type"] == "ByteLevel" for step in steps):
            return byte_level_bytes
        for step in steps:
            if step["type"] == "Metaspace":
                return functools.partial(sentencepiece_bytes, space=step.get("replacement", SPACE_MARK))
            if step["type"] == "Replace" and step.get("content") == SPACE_MARK:
                return sentencepiece_bytes
        raise self.error("decoder: wanted byte-level or SentencePiece spelling, got neither")

    def writes_first(self, token: str) -> bool:
        """Whether the post-processor puts ``token`` before every text."""
        for step in _nodes(self._root.get("post_processor")):
            first = (step.get("single") or [{}])[0] if step["type"] == "TemplateProcessing" else {}
            if first.get("SpecialToken", {}).get("id") == token:
                return True
        return False


class _Settings:
    """The small files around ``tokenizer.json``; all of them may be absent."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config = _read_json(directory / "tokenizer_config.json", optional=True)
        self._special_map = _read_json(directory / "special_tokens_map.json", optional=True)
        self._generation = _read_json(directory / "generation_config.json", optional=True)

    def _content(self, name: str) -> str | None:
        value = self._config.get(name) or self._special_map.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    def named_id(self, name: str, ids: Mapping[str, int]) -> int | None:
        """Id of ``bos_token`` or ``eos_token``, if the model has it."""
        content = self._content(name)
        if content is not None and content not in ids:
            raise TokenizerError(
                f"{self._directory}: {name}: wanted a token of the vocabulary, got {content!r}"
            )
        return None if content is None else ids[content]

    def added(self) -> list[AddedToken]:
        """Added tokens that only the config knows."""
        where = self._directory / "tokenizer_config.json"
        decoder = self._config.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise TokenizerError(f"{where}: added_tokens_decoder: wanted an object, got {decoder!r}")
        return [_added_token(token, token_id, where) for token_id, token in decoder.items()]

    def extra_special(self) -> frozenset[str]:
        """Spellings of further tokens that are never shown."""
        extra: list[Any] = []
        for name in ("additional_special_tokens", "extra_special_tokens"):
            value = self._config.get(name) or self._special_map.get(name) or []
            extra += value.values() if isinstance(value, dict) else value
        return frozenset(str(token.get("content") if isinstance(token, dict) else token) for token in extra)

    def add_bos(self, *, default: bool) -> bool:
        """Whether a raw prompt begins with the begin-of-sequence token."""
        value = self._config.get("add_bos_token")
        return value if isinstance(value, bool) else default

    def generation_stops(self) -> list[int]:
        """End ids of ``generation_config.json``."""
        value = self._generation.get("eos_token_id")
        stops = value if isinstance(value, list) else [] if value is None else [value]
        if not all(map(_is_token_id, stops)):
            path = self._directory / "generation_config.json"
            raise TokenizerError(f"{path}: eos_token_id: wanted a token id or a list of them, got {value!r}")
        return stops

    def chat_template(self) -> ChatTemplate | None:
        """The default template, with the one for tools where there are both."""
        processor = _read_json(self._directory / "chat_template.json", optional=True)
        source = processor.get("chat_template") or self._config.get("chat_template")
        named = source if isinstance(source, list) else [{"name": "default", "template": source}]
        sources: dict[Any, Any] = {
            entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)
        }
        files = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
        for name, file in files.items():
            if (self._directory / file).is_file():
                sources[name] = _read_text(self._directory / file)
        if not sources.get("default"):
            return None
        tokens = {name: self._content(name) for name in _TEMPLATE_TOKENS}
        return ChatTemplate(
            sources["default"],
            tool_source=sources.get("tool_use"),
            special_tokens={name: content for name, content in tokens.items() if content is not None},
        )


def _find_main(directory: Path) -> Path:
    path = directory / "tokenizer.json"
    if path.is_file():
        return path
    others = [name for name in _OTHER_FILES if (directory / name).is_file()]
    raise TokenizerError(
        f"{directory}: wanted tokenizer.json, got {', '.join(others) or 'no tokenizer'}; write one with "
        "transformers.AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY), "
        "or use the model's GGUF file"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: wanted a JSON object, got {type(value).__name__}")
    return value


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_VOCAB


def _check_ids(ids: set[int], size: int, directory: Path) -> None:
    outside = sorted(token_id for token_id in ids if token_id >= size)
    if outside:
        raise TokenizerError(
            f"{directory}: eos_token_id: wanted ids below {size}, the vocabulary, got {outside}"
        )


def _added_token(value: Any, token_id: Any, where: Path) -> AddedToken:
    content = value.get("content") if isinstance(value, dict) else None
    if isinstance(token_id, str) and token_id.isascii() and token_id.isdigit():
        token_id = int(token_id[:9])
    if not _is_token_id(token_id) or not isinstance(content, str) or not content:
        raise TokenizerError(f"{where}: added tokens: wanted objects with id and content, got {value!r}")
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    return AddedToken(content=content, id=token_id, **{name: bool(value.get(name)) for name in flags})


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every step in a nested pipeline description."""
    if isinstance(value, dict):
        if isinstance(value.get("type"), str):
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _nodes(item)


def _without_first_space(value: Any) -> Any:
    """The pre-tokenizer for text that is not the first: a space goes before the first word only."""
    if isinstance(value, list):
        return [_without_first_space(item) for item in value]
    if not isinstance(value, dict):
        return value
    changed = {key: _without_first_space(item) for key, item in value.items()}
    if changed.get("type") == "Metaspace" and changed.get("prepend_scheme") == "first":
        changed["prepend_scheme"] = "never"
    return changed
