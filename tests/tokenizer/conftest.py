"""Small tokenizers, trained here, in the forms in which checkpoints bring them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The sea is a vast and mysterious realm, teeming with life and unending in its own way.",
    "def count(numbers):\n    return sum(1 for n in numbers if n > 1234567890)\n",
    "don't we'll I'M it's naïve café — “quotes” … €5½ 日本語テキスト 中文 한국어 🎉",
    "user assistant system tool call end start im <b>bold</b> [1, 2, 3] {'a': 'b'} | pipes |",
] * 3
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>")
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<think>")

Write = Callable[..., Path]


def _added_entry(content: str, token_id: int, **flags: bool) -> dict[str, Any]:
    off = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": content not in NOT_SPECIAL, **off, **flags}


@pytest.fixture(scope="session")
def byte_level_file() -> dict[str, Any]:
    """``tokenizer.json`` of a byte-level BPE that splits digits singly; ids 0 to 5 are added tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(ADDED),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    document["added_tokens"] = [_added_entry(content, i) for i, content in enumerate(ADDED)]
    return document


@pytest.fixture(scope="session")
def sentencepiece_file() -> dict[str, Any]:
    """``tokenizer.json`` of a SentencePiece-like BPE with byte fallback; only the first word gets a space."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    # Word by word, so that no merge spans more than one.
    tokenizer.train_from_iterator([f" {word}" for text in CORPUS for word in text.split()], trainer)
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    vocab = document["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    document["normalizer"] = None
    document["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }
    document["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    document["added_tokens"] = [
        _added_entry(content, i) for i, content in enumerate(("<unk>", "<s>", "</s>"))
    ]
    return document


@pytest.fixture
def edit(byte_level_file: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """A fresh copy of the byte-level file, to be changed."""
    return lambda: copy.deepcopy(byte_level_file)


@pytest.fixture
def write_directory(tmp_path: Path) -> Write:
    """Write a model directory: ``tokenizer.json`` and other files by name without ``.json``."""

    def write(main: dict[str, Any] | None, template: str | None = None, **files: dict[str, Any]) -> Path:
        for name, content in ({} if main is None else {"tokenizer": main} | files).items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), "utf-8")
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
        return tmp_path

    return write


@pytest.fixture(scope="session")
def byte_level_metadata(byte_level_file: dict[str, Any]) -> dict[str, Any]:
    """The byte-level tokenizer as GGUF metadata, with a ChatML template."""
    vocab = byte_level_file["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [4 if token in NOT_SPECIAL else 3 if token in ADDED else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in byte_level_file["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, Any]:
    """A SentencePiece vocabulary as GGUF metadata: pieces with scores, no merges."""
    words = [
        "▁the",
        "▁then",
        "▁he",
        "hen",
        "he",
        "en",
        "▁t",
        "▁th",
        "th",
        "in",
        "ing",
        "▁in",
        "ab",
        "aa",
        "aaa",
    ]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", "é", "<", ">", "|", "0", "x", "A"]
    pieces = [*words, *dict.fromkeys(letters)]
    added = ["<unk>", "<s>", "</s>", "<|user|>", "▁▁", "▁▁▁", "<tool_call>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*added, *byte_tokens, *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 4, 4, 4] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * (len(added) + 256) + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
