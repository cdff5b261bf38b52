"""What tensors of any format pass on their way to the decoder: split the fused, drop the tied, permute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from astrai_triton.checkpoint.progress import Progress, ignore
from astrai_triton.errors import WeightsMismatchError
from astrai_triton.model.config import ModelConfig, RopePairing
from astrai_triton.model.rotary import permute_pairing

NamedTensors = Iterable[tuple[str, Tensor]]


def track(
    sized: Iterable[tuple[str, Tensor, int]], total: int, progress: Progress | None
) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors on and report, after each, how many of ``total`` stored bytes have been used.

    Args:
        sized: name, tensor and its size in the file.
        total: size of all.
        progress: whom to tell.
    """
    report = progress or ignore
    done = 0
    for name, tensor, num_bytes in sized:
        yield name, tensor
        done += num_bytes
        report("loading weights", done, total)


def split_fused(config: ModelConfig, named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Split ``attn.qkv`` into q, k, v and ``mlp.gate_up`` into gate, up; pass everything else on.

    The parts are views of the fused tensor.

    Raises:
        WeightsMismatchError: the fused tensor has another number of rows than its parts together.
    """
    q_rows, kv_rows = config.n_q_heads * config.head_dim, config.n_kv_heads * config.head_dim
    parts = {
        "qkv": (("q", "k", "v"), [q_rows, kv_rows, kv_rows]),
        "gate_up": (("gate", "up"), [config.intermediate_size] * 2),
    }
    for name, tensor in named:
        stem, _, kind = name.rpartition(".")
        block, _, module = stem.rpartition(".")
        if module not in parts:
            yield name, tensor
            continue
        modules, rows = parts[module]
        if tensor.shape[:1] != (sum(rows),):
            raise WeightsMismatchError(
                f"{name}: wanted {sum(rows)} rows ({' + '.join(map(str, rows))} for {', '.join(modules)}), "
                f"got shape {list(tensor.shape)}; config and weights are of different models"
            )
        for part, piece in zip(modules, torch.split(tensor, rows), strict=True):
            yield f"{block}.{part}.{kind}", piece


def drop_tied_head(config: ModelConfig, named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Leave out an ``lm_head.weight`` that repeats the embedding of a tied model; pass everything else on.

    Raises:
        WeightsMismatchError: the config says tied, but the head holds other numbers than the embedding.
    """
    tied: dict[str, Tensor] = {}
    for name, tensor in named:
        if config.tie_embeddings and name in ("embed.weight", "lm_head.weight"):
            tied[name] = tensor
            if len(tied) == 2 and not _equal(*tied.values()):
                raise WeightsMismatchError(
                    "lm_head.weight: the config says it is tied to the embedding (tie_word_embeddings), "
                    "but it holds other values; set tie_word_embeddings to false to use it"
                )
        if not (config.tie_embeddings and name == "lm_head.weight"):
            yield name, tensor


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def permute_heads(
    config: ModelConfig, named: NamedTensors, target: RopePairing
) -> Iterator[tuple[str, Tensor]]:
    """Reorder the rows of q and k (weights, biases and per-head norms) to the rotary pairing ``target``.

    Args:
        config: describes the tensors at hand; ``config.pairing`` is their present order.
        named: canonical names and tensors.
        target: the order wanted.
    """
    if config.pairing == target:
        yield from named
        return
    heads = {
        "attn.q": config.n_q_heads,
        "attn.k": config.n_kv_heads,
        "attn.q_norm": 1,
        "attn.k_norm": 1,
    }
    for name, tensor in named:
        module = ".".join(name.split(".")[2:-1])
        if not name.startswith("layers.") or module not in heads:
            yield name, tensor
            continue
        n_heads = heads[module]
        if tensor.shape[:1] != (n_heads * config.head_dim,):
            raise WeightsMismatchError(
                f"{name}: wanted {n_heads * config.head_dim} rows, {n_heads} heads of {config.head_dim}, "
                f"got shape {list(tensor.shape)}; config and weights are of different models"
            )
        rotary_dim = config.layers[0].rope.rotary_dim
        yield name, permute_pairing(tensor, n_heads, config.head_dim, rotary_dim, config.pairing, target)
