"""Any checkpoint -> a Hugging Face directory, for other programs to load the same weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from astrai_triton.checkpoint.checkpoint import Checkpoint
from astrai_triton.checkpoint.convert import permute_heads
from astrai_triton.checkpoint.hf_export import to_hf_config
from astrai_triton.checkpoint.names import NormPlacement, canonical_to_hf

_INDEX = "model.safetensors.index.json"
_FUSED = {"attn.qkv": ("attn.q", "attn.k", "attn.v"), "mlp.gate_up": ("mlp.gate", "mlp.up")}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


def export_directory(
    checkpoint: Checkpoint,
    directory: Path | str,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 2 << 30,
) -> Path:
    """Write ``config.json`` and safetensors in the layout of ``transformers``; copy the tokenizer's files.

    The tokenizer of a GGUF has no such files and is not written. Gemma norms lose their +1, which rounds the
    last bit of weights below 0.5.

    Args:
        checkpoint: what to write.
        directory: made if missing; should hold no other model.
        dtype: type to store; None keeps each tensor's own (float32 for quantised ones).
        max_shard_bytes: a new file is begun when the next tensor would exceed this; bounds the memory, too.

    Returns:
        The directory.

    Raises:
        UnsupportedModelError: the configuration cannot be said in a ``config.json``.
        WeightsMismatchError: a tensor contradicts the configuration.
    """
    directory = Path(directory)
    config = to_hf_config(checkpoint.config)
    directory.mkdir(parents=True, exist_ok=True)
    writer = _ShardWriter(directory, max_shard_bytes)
    for name, tensor in _hf_tensors(checkpoint):
        # A copy of its own: parts of one stored tensor share memory, which safetensors refuses.
        stored = tensor.to(dtype or tensor.dtype).contiguous().clone()
        writer.add(name, stored)
        if name.endswith("embed_tokens.weight"):
            config["torch_dtype"] = str(stored.dtype).removeprefix("torch.")
    writer.close()
    _write_json(directory / "config.json", config)
    if checkpoint.path.is_dir():
        for file in _TOKENIZER_FILES:
            if (checkpoint.path / file).is_file():
                shutil.copyfile(checkpoint.path / file, directory / file)
    return directory


class _ShardWriter:
    """Writes tensors to ``model-00001.safetensors`` and so on, and the index."""

    def __init__(self, directory: Path, max_shard_bytes: int) -> None:
        self.directory = directory
        self.max_shard_bytes = max_shard_bytes
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = 0
        self.total_bytes = 0
        self.num_shards = 0
        self.weight_map: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        if self.pending and self.pending_bytes + tensor.nbytes > self.max_shard_bytes:
            self.flush()
        self.pending[name] = tensor
        self.pending_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def flush(self) -> None:
        self.num_shards += 1
        file = f"model-{self.num_shards:05d}.safetensors"
        save_file(self.pending, self.directory / file, metadata={"format": "pt"})
        self.weight_map.update(dict.fromkeys(self.pending, file))
        self.pending, self.pending_bytes = {}, 0

    def close(self) -> None:
        self.flush()
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": self.weight_map}
        _write_json(self.directory / _INDEX, index)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _hf_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Tensors under their Hugging Face names, q and k for half-split pairs."""
    config = checkpoint.config
    placement: NormPlacement = "both" if config.post_norms else "pre"
    named = permute_heads(config, checkpoint.tensors(), "half")
    for name, tensor in _fuse(named) if config.arch == "phi3" else named:
        if config.post_norms and name.endswith("norm.weight"):
            tensor = tensor.float() - 1.0
        yield canonical_to_hf(name, placement), tensor


def _fuse(named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Join what Phi-3 stores as one tensor, as soon as all parts have come."""
    waiting: dict[str, Tensor] = {}
    for name, tensor in named:
        layer, module = ".".join(name.split(".")[:2]), ".".join(name.split(".")[2:-1])
        fused = next((whole for whole, parts in _FUSED.items() if module in parts), None)
        if fused is None:
            yield name, tensor
            continue
        waiting[name] = tensor
        parts = [f"{layer}.{part}.weight" for part in _FUSED[fused]]
        if all(part in waiting for part in parts):
            yield f"{layer}.{fused}.weight", torch.cat([waiting.pop(part) for part in parts])
