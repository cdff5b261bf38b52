"""GGUF tensors under their canonical names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astrai_triton.checkpoint.gguf import GgufModel
from astrai_triton.checkpoint.hf import convert_tensors, parse_config
from astrai_triton.errors import WeightsMismatchError

Make = Callable[..., Any]
Write = Callable[..., Path]


def test_names_and_shapes_are_those_of_the_same_models_safetensors(
    arch: str, make_model: Make, write_gguf: Write
) -> None:
    model = make_model(arch)
    got = {name: tensor.shape for name, tensor in GgufModel.open(write_gguf(arch, model=model)).tensors()}
    wanted = convert_tensors(parse_config(model.config), model.tensors.items())
    assert got == {name: tensor.shape for name, tensor in wanted}


def test_gemma_norms_are_taken_as_stored(make_model: Make, write_gguf: Write) -> None:
    model = make_model("gemma2")
    tensors = dict(GgufModel.open(write_gguf("gemma2", model=model)).tensors())
    assert torch.equal(tensors["norm.weight"], model.tensors["model.norm.weight"] + 1)


def test_tables_that_are_no_weights_are_left_out(write_gguf: Write) -> None:
    extra = {"rope_freqs.weight": np.ones(4), "blk.0.attn_rot_embd.weight": np.ones(4)}
    with_tables = dict(GgufModel.open(write_gguf(tensors=extra)).tensors())
    assert with_tables.keys() == dict(GgufModel.open(write_gguf()).tensors()).keys()


def test_an_unknown_tensor_is_passed_on_under_its_name(write_gguf: Write) -> None:
    model = GgufModel.open(write_gguf(tensors={"blk.0.ssm_a": np.ones(4)}))
    assert "blk.0.ssm_a" in dict(model.tensors())


def test_a_fused_tensor_with_other_rows_is_named(write_gguf: Write) -> None:
    model = GgufModel.open(write_gguf("phi3", tensors={"blk.0.ffn_up.weight": np.ones((95, 32))}))
    with pytest.raises(WeightsMismatchError, match=r"layers\.0\.mlp\.gate_up\.weight: wanted 96 rows"):
        dict(model.tensors())


def test_tensors_are_read_one_at_a_time(write_gguf: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    model = GgufModel.open(write_gguf())
    read: list[str] = []
    plain = model.file.tensor
    monkeypatch.setattr(model.file, "tensor", lambda name: read.append(name) or plain(name))
    tensors = model.tensors()
    assert read == []
    next(tensors)
    assert len(read) == 1
