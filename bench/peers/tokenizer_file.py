"""``tokenizer.json`` and the files beside it, from the metadata of a GGUF: what transformers reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from astrai_triton.errors import TokenizerError
from astrai_triton.tokenizer.splitting import find_splitting

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Of ``tokenizer.ggml.token_type``: tokens that are found as strings."""


def build_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The byte-level BPE tokenizer of a GGUF, control tokens included.

    Raises:
        TokenizerError: another kind of tokenizer, or a splitting that is not known.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TokenizerError(f"tokenizer.ggml.model: wanted 'gpt2' (byte-level BPE), got {kind!r}")
    tokens = metadata["tokenizer.ggml.tokens"]
    splitting = find_splitting(metadata.get("tokenizer.ggml.pre"))
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    vocab = {token: idx for idx, token in enumerate(tokens)}
    built = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignore_merges)
    )
    if splitting.normalizer is not None:
        built.normalizer = splitting.normalizer()
    built.pre_tokenizer = splitting.build()
    built.decoder = tokenizers.decoders.ByteLevel()
    for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        added = tokenizers.AddedToken(token, normalized=False)
        if kind in (_UNKNOWN, _CONTROL):
            built.add_special_tokens([added])
        elif kind == _USER_DEFINED:
            built.add_tokens([added])
    return built


def write_tokenizer(metadata: Mapping[str, Any], directory: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    Raises:
        TokenizerError: as ``build_tokenizer``.
    """
    build_tokenizer(metadata).save(str(directory / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    named = {f"{name}_token": tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template"),
        **named,
        "pad_token": named.get("eos_token"),
    }
    write_json(directory / "tokenizer_config.json", config)
    generation = {f"{name}_token_id": token_id for name, token_id in ids.items()}
    write_json(directory / "generation_config.json", generation | {"pad_token_id": ids["eos"]})


def write_json(path: Path, value: object) -> None:
    """Indented, with a line end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
