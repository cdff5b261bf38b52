"""GGUF checkpoints: one file with configuration, tokenizer and (quantised) tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
from torch import Tensor

from astrai_triton.checkpoint.convert import NamedTensors, split_fused, track
from astrai_triton.checkpoint.gguf_config import parse_gguf_config
from astrai_triton.checkpoint.gguf_file import GgufFile
from astrai_triton.checkpoint.names import gguf_to_canonical
from astrai_triton.checkpoint.progress import Progress
from astrai_triton.model.config import ModelConfig
from astrai_triton.tokenizer import Tokenizer, from_gguf

# Part of the configuration, or a table that every reader computes for itself.
_NO_WEIGHTS = ("rope_freqs.weight", ".attn_rot_embd.weight")


@attrs.frozen(eq=False)
class GgufModel:
    """A GGUF file with its configuration."""

    file: GgufFile
    config: ModelConfig
    """``pairing`` is the order of q and k rows in the file."""

    @classmethod
    def open(cls, path: Path) -> GgufModel:
        """Read header and configuration.

        Raises:
            CorruptFileError: not a GGUF file, truncated, or it contradicts itself.
            UnsupportedModelError: an architecture, rope scaling or tensor type that is not implemented.
        """
        file = GgufFile(path)
        return cls(file, parse_gguf_config(file))

    @property
    def num_tensors(self) -> int:
        """Tensors in the file."""
        return len(self.file.entries)

    @property
    def num_bytes(self) -> int:
        """Their size as stored."""
        return self.file.num_bytes

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer from the metadata."""
        return from_gguf(self.file.metadata)

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[str, Tensor]]:
        """Canonical names and tensors in the order of the file, dequantised one at a time."""
        entries = self.file.entries.values()
        stored = ((entry.name, self.file.tensor(entry.name), entry.num_bytes) for entry in entries)
        return convert_tensors(self.config, track(stored, self.num_bytes, progress))


def convert_tensors(config: ModelConfig, named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Give GGUF tensors their canonical names and split what Phi-3 fuses, lazily and in the order they come.

    A name that is unknown is passed on as it is, so that the model refuses it. Gemma's norms are stored with
    their +1 included.

    Args:
        config: from ``parse_gguf_config``; q and k keep its ``pairing``.
        named: names as in the file, and tensors.

    Raises:
        WeightsMismatchError: a fused tensor has the wrong number of rows.
    """
    fused_gate_up = config.arch == "phi3"
    renamed = (
        (gguf_to_canonical(name, fused_gate_up=fused_gate_up) or name, tensor)
        for name, tensor in named
        if not name.endswith(_NO_WEIGHTS)
    )
    return split_fused(config, renamed)
