"""A model's files as one thing: configuration, tokenizer and tensors, whatever the format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import attrs
from torch import Tensor

from astrai_triton.checkpoint.convert import permute_heads
from astrai_triton.checkpoint.gguf import GgufModel
from astrai_triton.checkpoint.hf import HfModel
from astrai_triton.checkpoint.progress import Progress
from astrai_triton.errors import UnknownModelError
from astrai_triton.model.config import ModelConfig, RopePairing
from astrai_triton.tokenizer import Tokenizer


@attrs.frozen(kw_only=True, eq=False)
class Checkpoint:
    """An open checkpoint. Build it with ``open_checkpoint``."""

    name: str
    """What to call the model: ``org/name`` for a hub snapshot, else the name of the file or directory."""
    path: Path
    """The ``.gguf`` file or the directory."""
    config: ModelConfig
    """Describes the tensors as ``tensors`` gives them."""
    num_tensors: int
    """Tensors in the files; ``tensors`` gives more where some are fused, fewer where some are not needed."""
    num_bytes: int
    """Size of the tensors in the files."""
    _files: GgufModel | HfModel

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built on first use.

        Raises:
            TokenizerError: its files are missing, broken or of a kind that is not implemented.
            ChatTemplateError: the chat template is not valid Jinja.
        """
        return self._files.tokenizer()

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[str, Tensor]]:
        """Canonical names (``names.py``) and CPU tensors, lazily, in the order of the files.

        Quantised tensors come as float32, others in the type they are stored in, as views of the mapped file
        where nothing had to be computed. An unknown tensor comes under its own name.

        Args:
            progress: told the bytes of the files that are done, of ``num_bytes``, after each stored tensor.

        Raises:
            WeightsMismatchError: a tensor contradicts the configuration.
            CorruptFileError: a file was damaged since it was opened.
        """
        return permute_heads(self._files.config, self._files.tensors(progress), self.config.pairing)


def open_checkpoint(
    path: Path | str, *, pairing: RopePairing | None = "adjacent", name: str | None = None
) -> Checkpoint:
    """Open a checkpoint: reads headers and configuration, no weights.

    Args:
        path: a ``.gguf`` file, or a directory with ``config.json`` and safetensors, e.g. from ``resolve``.
        pairing: order in which q and k rows are wanted; None leaves them as they are stored.
        name: replaces the name taken from the path.

    Raises:
        UnknownModelError: the path does not exist.
        CheckpointError: the directory lacks files, or has only pickled weights.
        CorruptFileError: a file is damaged or contradicts itself.
        UnsupportedModelError: an architecture, rope scaling or tensor type that is not implemented.
    """
    if pairing not in (None, "adjacent", "half"):
        raise ValueError(f"pairing: wanted 'adjacent', 'half' or None, got {pairing!r}")
    path = Path(path)
    if not path.exists():
        raise UnknownModelError(
            f"{path}: no such file or directory; wanted a .gguf file or a model directory"
        )
    files = HfModel.open(path) if path.is_dir() else GgufModel.open(path)
    config = files.config if pairing is None else attrs.evolve(files.config, pairing=pairing)
    return Checkpoint(
        name=name or _name(path),
        path=path,
        config=config,
        num_tensors=files.num_tensors,
        num_bytes=files.num_bytes,
        files=files,
    )


def _name(path: Path) -> str:
    if path.is_file():
        return path.stem
    path = path.resolve()
    # The hub's cache: models--org--name/snapshots/<revision>.
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name
