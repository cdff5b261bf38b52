"""Splitting, permuting and tracking tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from astrai_triton.checkpoint.convert import permute_heads, track
from astrai_triton.checkpoint.hf import parse_config
from astrai_triton.errors import WeightsMismatchError
from astrai_triton.model.config import ModelConfig

Make = Callable[..., Any]


@pytest.fixture
def config(make_config: Make) -> ModelConfig:
    return parse_config(make_config("qwen3"))


def rows(count: int) -> torch.Tensor:
    return torch.arange(float(count))


def permute(config: ModelConfig, name: str, tensor: torch.Tensor, target: Any) -> torch.Tensor:
    ((got_name, got),) = permute_heads(config, [(name, tensor)], target)
    assert got_name == name
    return got


def test_each_head_of_q_is_interleaved_by_itself(config: ModelConfig) -> None:
    got = permute(config, "layers.0.attn.q.bias", rows(32), "adjacent")
    first = [0, 4, 1, 5, 2, 6, 3, 7]
    assert got.tolist() == [head * 8 + row for head in range(4) for row in first]


def test_k_uses_the_number_of_kv_heads(config: ModelConfig) -> None:
    got = permute(config, "layers.1.attn.k.weight", rows(16)[:, None], "adjacent")
    assert got[:, 0].tolist() == [head * 8 + row for head in range(2) for row in [0, 4, 1, 5, 2, 6, 3, 7]]


@pytest.mark.parametrize("name", ["layers.0.attn.q_norm.weight", "layers.0.attn.k_norm.weight"])
def test_norms_over_a_head_are_permuted_as_one_head(name: str, config: ModelConfig) -> None:
    assert permute(config, name, rows(8), "adjacent").tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(
    "name", ["layers.0.attn.v.weight", "layers.0.attn.o.weight", "norm.weight", "unknown"]
)
def test_everything_else_is_passed_on(name: str, config: ModelConfig) -> None:
    tensor = rows(16)
    assert permute(config, name, tensor, "adjacent") is tensor


def test_only_the_rotary_part_of_a_head_is_permuted(make_config: Make) -> None:
    config = parse_config({**make_config("qwen3"), "partial_rotary_factor": 0.5, "rope_parameters": None})
    got = permute(config, "layers.0.attn.k_norm.weight", rows(8), "adjacent")
    assert got.tolist() == [0, 2, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("name", ["layers.0.attn.q.weight", "layers.0.attn.q.bias"])
def test_there_and_back_is_the_same(name: str, config: ModelConfig) -> None:
    tensor = torch.randn(32, 5) if name.endswith("weight") else torch.randn(32)
    there = permute(config, name, tensor, "adjacent")
    assert not torch.equal(there, tensor)
    back = permute(attrs.evolve(config, pairing="adjacent"), name, there, "half")
    assert torch.equal(back, tensor)


def test_a_wrong_number_of_rows_is_named(config: ModelConfig) -> None:
    with pytest.raises(WeightsMismatchError, match=r"layers\.0\.attn\.k\.bias: wanted 16 rows.*\[32\]"):
        permute(config, "layers.0.attn.k.bias", rows(32), "adjacent")


def test_progress_counts_stored_bytes_after_each_tensor() -> None:
    told: list[tuple[str, int, int]] = []
    tensors = track([("a", rows(1), 10), ("b", rows(1), 5)], 15, lambda *args: told.append(args))
    next(tensors)
    assert told == []
    assert [name for name, _ in tensors] == ["b"]
    assert told == [("loading weights", 10, 15), ("loading weights", 15, 15)]
