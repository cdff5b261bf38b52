"""Hugging Face checkpoints: a directory with ``config.json`` and memory-mapped safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from astrai_triton.checkpoint.convert import NamedTensors, drop_tied_head, split_fused, track
from astrai_triton.checkpoint.hf_config import parse_config
from astrai_triton.checkpoint.names import hf_to_canonical
from astrai_triton.checkpoint.progress import Progress
from astrai_triton.errors import CheckpointError, CorruptFileError, UnsupportedModelError
from astrai_triton.model.config import ModelConfig
from astrai_triton.tokenizer import Tokenizer, from_directory

__all__ = ["HfModel", "convert_tensors", "parse_config", "read_config"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# The longest first: one is the beginning of another.
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def read_config(directory: Path) -> dict[str, Any]:
    """The JSON object in ``config.json``.

    Raises:
        CheckpointError: the directory has no such file.
        CorruptFileError: the file is not a JSON object.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{directory}: no config.json; wanted a Hugging Face model directory "
            "(config.json and *.safetensors) or the path of a .gguf file"
        )
    return _read_object(path)


def convert_tensors(config: ModelConfig, named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Give Hugging Face tensors their canonical names and form, lazily and in the order they come.

    Splits what Phi-3 fuses, adds Gemma's +1 to norm weights (in float32), leaves out rotary buffers, a tied
    head and the vision part of multimodal Gemma 3. A name that is unknown is passed on as it is, so that the
    model refuses it.

    Args:
        config: of the model the tensors belong to.
        named: names as in the files, and tensors.

    Raises:
        WeightsMismatchError: a fused tensor has the wrong number of rows, or a head said to be tied is not.
    """
    return drop_tied_head(config, split_fused(config, _rename(config, named)))


def _rename(config: ModelConfig, named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    gemma = config.post_norms
    for name, tensor in named:
        if name.endswith(".rotary_emb.inv_freq") or (config.arch == "gemma3" and name.startswith(_VISION)):
            continue
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        canonical = hf_to_canonical(name[len(prefix) :], "both" if gemma else "pre")
        if canonical is None:
            yield name, tensor
        elif gemma and canonical.endswith("norm.weight"):
            yield canonical, tensor.float() + 1.0
        else:
            yield canonical, tensor


@attrs.frozen(eq=False)
class HfModel:
    """A model directory with its configuration."""

    directory: Path
    config: ModelConfig
    """``pairing`` is "half"."""
    shards: tuple[Path, ...]
    """The safetensors files."""
    num_tensors: int
    """Tensors in all files."""
    num_bytes: int
    """Their size as stored."""

    @classmethod
    def open(cls, directory: Path) -> HfModel:
        """Read ``config.json`` and the headers of the safetensors.

        Raises:
            CheckpointError: a file is missing, or the weights are pickles.
            CorruptFileError: a header is damaged, a file is truncated, or the index names absent tensors.
            UnsupportedModelError: an architecture, rope scaling or tensor type that is not implemented.
        """
        config = parse_config(read_config(directory), str(directory / "config.json"))
        shards = _find_shards(directory)
        names: set[str] = set()
        num_bytes = 0
        for shard, expected in shards.items():
            sizes = _read_sizes(shard)
            missing = expected - sizes.keys()
            if missing:
                raise CorruptFileError(
                    f"{directory / _INDEX}: says that {shard.name} holds {min(missing)!r}, "
                    "which it does not; fetch the checkpoint again"
                )
            repeated = names & sizes.keys()
            if repeated:
                raise CorruptFileError(f"{shard}: holds {min(repeated)!r}, which an earlier shard holds, too")
            names |= sizes.keys()
            num_bytes += sum(sizes.values())
        return cls(directory, config, tuple(shards), len(names), num_bytes)

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer from the directory's files."""
        return from_directory(self.directory)

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[str, Tensor]]:
        """Canonical names and tensors, shard after shard."""
        sized = ((name, tensor, tensor.nbytes) for name, tensor in self._stored())
        return convert_tensors(self.config, track(sized, self.num_bytes, progress))

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        for shard in self.shards:
            try:
                with safe_open(shard, framework="pt", device="cpu") as reader:
                    for name in reader.keys():  # noqa: SIM118
                        yield name, reader.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise _damaged(shard, error) from error


def _find_shards(directory: Path) -> dict[Path, set[str]]:
    """Each file with the names the index expects in it (none where there is no index)."""
    index = directory / _INDEX
    if index.is_file():
        return _read_index(index)
    if (directory / _SINGLE).is_file():
        return {directory / _SINGLE: set()}
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: set()}
    if found:
        raise CheckpointError(
            f"{directory}: {len(found)} safetensors files but no {_INDEX} to say which belong together; "
            "add the index or keep one file"
        )
    pickled = sorted([*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")])
    if pickled:
        raise CheckpointError(
            f"{directory}: the weights are pickles ({pickled[0].name}), which are never loaded because they "
            "can run code; convert them to safetensors, e.g. with save_pretrained() of transformers"
        )
    raise CheckpointError(f"{directory}: no *.safetensors file; fetch the weights into this directory")


def _read_index(index: Path) -> dict[Path, set[str]]:
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(f"{index}: wanted an object 'weight_map' of tensor names to file names")
    shards: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CorruptFileError(
                f"{index}: {name!r}: wanted the name of a file beside the index, got {file!r}"
            )
        shards.setdefault(index.parent / file, set()).add(name)
    missing = sorted(shard.name for shard in shards if not shard.is_file())
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}; "
            "finish the download"
        )
    return dict(sorted(shards.items()))


def _read_sizes(shard: Path) -> dict[str, int]:
    """Bytes of each tensor in a file; maps the file, reads its header only."""
    sizes: dict[str, int] = {}
    try:
        with safe_open(shard, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118
                tensor = reader.get_tensor(name)
                if tensor.dtype not in _DTYPES:
                    raise UnsupportedModelError(
                        f"{shard}: tensor {name!r} has type {_spell(tensor.dtype)}, which is not "
                        f"implemented; choices: {', '.join(map(_spell, _DTYPES))}"
                    )
                sizes[name] = tensor.nbytes
    except (SafetensorError, OSError) as error:
        raise _damaged(shard, error) from error
    return sizes


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path}: not valid JSON: {error}; fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path}: wanted a JSON object, got {type(value).__name__}")
    return value


def _damaged(shard: Path, error: Exception) -> CorruptFileError:
    return CorruptFileError(f"{shard}: not a whole safetensors file ({error}); fetch it again")
