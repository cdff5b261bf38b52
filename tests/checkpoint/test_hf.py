"""Safetensors directories: names, fused and tied tensors, shards, damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from astrai_triton.checkpoint.hf import HfModel, convert_tensors, parse_config
from astrai_triton.errors import (
    CheckpointError,
    CorruptFileError,
    UnsupportedModelError,
    WeightsMismatchError,
)
from astrai_triton.model.config import ModelConfig

Make = Callable[..., Any]


def canonical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder wants, written down a second time."""
    hidden, mlp, vocab, dim = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    q_rows, kv_rows = config.n_q_heads * dim, config.n_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocab, hidden), "norm.weight": (hidden,)}
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config.n_layers):
        layer = {
            "attn_norm.weight": (hidden,),
            "mlp_norm.weight": (hidden,),
            "attn.q.weight": (q_rows, hidden),
            "attn.k.weight": (kv_rows, hidden),
            "attn.v.weight": (kv_rows, hidden),
            "attn.o.weight": (hidden, q_rows),
            "mlp.gate.weight": (mlp, hidden),
            "mlp.up.weight": (mlp, hidden),
            "mlp.down.weight": (hidden, mlp),
        }
        if config.qkv_bias:
            layer |= {"attn.q.bias": (q_rows,), "attn.k.bias": (kv_rows,), "attn.v.bias": (kv_rows,)}
        if config.qk_norm:
            layer |= {"attn.q_norm.weight": (dim,), "attn.k_norm.weight": (dim,)}
        if config.post_norms:
            layer |= {"post_attn_norm.weight": (hidden,), "post_mlp_norm.weight": (hidden,)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def convert(model: Any, extra: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    named = {**model.tensors, **(extra or {})}
    return dict(convert_tensors(parse_config(model.config), named.items()))


def test_every_tensor_of_transformers_gets_its_canonical_name_and_shape(arch: str, make_model: Make) -> None:
    model = make_model(arch)
    got = {name: tuple(tensor.shape) for name, tensor in convert(model).items()}
    assert got == canonical_shapes(parse_config(model.config))


def test_phi3s_fused_tensors_are_split_in_order(make_model: Make) -> None:
    model = make_model("phi3")
    tensors = convert(model)
    fused = model.tensors["model.layers.1.self_attn.qkv_proj.weight"]
    assert torch.equal(tensors["layers.1.attn.q.weight"], fused[:32])
    assert torch.equal(tensors["layers.1.attn.k.weight"], fused[32:48])
    assert torch.equal(tensors["layers.1.attn.v.weight"], fused[48:])
    gate_up = model.tensors["model.layers.0.mlp.gate_up_proj.weight"]
    assert torch.equal(tensors["layers.0.mlp.gate.weight"], gate_up[:48])
    assert torch.equal(tensors["layers.0.mlp.up.weight"], gate_up[48:])


def test_a_fused_tensor_with_other_rows_is_named(make_model: Make) -> None:
    model = make_model("phi3")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    with pytest.raises(
        WeightsMismatchError, match=r"layers\.1\.attn\.qkv\.weight: wanted 64 rows.*\[63, 32\]"
    ):
        convert(model, {name: model.tensors[name][:-1]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemma_norms_get_their_one_in_float32(dtype: torch.dtype, make_model: Make) -> None:
    model = make_model("gemma3")
    name = "model.layers.0.self_attn.q_norm.weight"
    stored = (model.tensors[name] / 1024).to(dtype)
    got = convert(model, {name: stored})["layers.0.attn.q_norm.weight"]
    assert got.dtype == torch.float32
    assert torch.equal(got, stored.float() + 1)


def test_other_norms_are_left_alone(make_model: Make) -> None:
    model = make_model("qwen3")
    got = convert(model)["layers.0.attn.q_norm.weight"]
    assert torch.equal(got, model.tensors["model.layers.0.self_attn.q_norm.weight"])


def test_a_rotary_buffer_is_left_out(make_model: Make) -> None:
    tensors = convert(make_model("llama"), {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert not [name for name in tensors if "inv_freq" in name]


@pytest.mark.parametrize("head_first", [False, True])
def test_a_tied_head_is_left_out(head_first: bool, make_model: Make) -> None:
    model = make_model("llama", tie_word_embeddings=True)
    head = {"lm_head.weight": model.tensors["model.embed_tokens.weight"].clone()}
    named = {**head, **model.tensors} if head_first else {**model.tensors, **head}
    tensors = dict(convert_tensors(parse_config(model.config), named.items()))
    assert "lm_head.weight" not in tensors
    assert "embed.weight" in tensors


def test_a_head_that_is_only_said_to_be_tied_is_an_error(make_model: Make) -> None:
    model = make_model("llama", tie_word_embeddings=True)
    with pytest.raises(WeightsMismatchError, match="tie_word_embeddings"):
        convert(model, {"lm_head.weight": model.tensors["model.embed_tokens.weight"] + 1})


def test_an_unknown_tensor_is_passed_on_under_its_name(make_model: Make) -> None:
    assert "model.layers.0.self_attn.q_proj.lora_A" in convert(
        make_model("llama"), {"model.layers.0.self_attn.q_proj.lora_A": torch.ones(2)}
    )


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""])
def test_every_prefix_of_a_text_model_is_known(prefix: str, make_model: Make) -> None:
    model = make_model("gemma3")
    renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in model.tensors.items()}
    got = dict(convert_tensors(parse_config(model.config), renamed.items()))
    assert got.keys() == convert(model).keys()


def test_the_vision_part_of_gemma3_is_left_out(make_model: Make) -> None:
    model = make_model("gemma3")
    vision = {
        "vision_tower.embeddings.weight": torch.ones(1),
        "multi_modal_projector.norm.weight": torch.ones(1),
    }
    assert convert(model, vision).keys() == convert(model).keys()


def test_a_directory_is_opened_with_its_sizes(make_model: Make, tmp_path: Path) -> None:
    model = make_model("llama")
    opened = HfModel.open(model.save(tmp_path))
    assert opened.num_tensors == len(model.tensors)
    assert opened.num_bytes == sum(tensor.nbytes for tensor in model.tensors.values())
    assert opened.config == parse_config(model.config)
    got = dict(opened.tensors())
    assert torch.equal(got["layers.1.attn.k.weight"], model.tensors["model.layers.1.self_attn.k_proj.weight"])


def test_the_stored_type_is_kept(make_model: Make, tmp_path: Path) -> None:
    model = make_model("llama")
    for name in model.tensors:
        model.tensors[name] = model.tensors[name].to(torch.bfloat16)
    assert {tensor.dtype for _, tensor in HfModel.open(model.save(tmp_path)).tensors()} == {torch.bfloat16}


def shard(model: Any, directory: Path) -> dict[str, str]:
    """Save a model as two shards with an index; returns the index's weight map."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model.config))
    names = sorted(model.tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: model.tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_together(make_model: Make, tmp_path: Path) -> None:
    model = make_model("llama")
    shard(model, tmp_path)
    opened = HfModel.open(tmp_path)
    assert opened.num_tensors == len(model.tensors)
    assert {name: tensor.tolist() for name, tensor in opened.tensors()} == {
        name: tensor.tolist() for name, tensor in convert(model).items()
    }


def test_a_missing_shard_is_named(make_model: Make, tmp_path: Path) -> None:
    shard(make_model("llama"), tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"1 of 2 shards are missing: model-00002-of-00002\.safetensors"
    ):
        HfModel.open(tmp_path)


def test_a_tensor_that_only_the_index_knows_is_named(make_model: Make, tmp_path: Path) -> None:
    weight_map = shard(make_model("llama"), tmp_path)
    write_index(tmp_path, {**weight_map, "model.extra.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(CorruptFileError, match=r"model\.extra\.weight"):
        HfModel.open(tmp_path)


def test_a_tensor_in_two_shards_is_named(make_model: Make, tmp_path: Path) -> None:
    model = make_model("llama")
    shard(model, tmp_path)
    save_file(model.tensors, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(
        CorruptFileError, match=r"model-00002.*'lm_head\.weight', which an earlier shard holds"
    ):
        HfModel.open(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}, {"a": "../model.safetensors"}])
def test_a_senseless_index_is_an_error(weight_map: Any, make_model: Make, tmp_path: Path) -> None:
    shard(make_model("llama"), tmp_path)
    write_index(tmp_path, weight_map)
    with pytest.raises(CorruptFileError, match=r"model\.safetensors\.index\.json"):
        HfModel.open(tmp_path)


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    damaged = {
        "empty": b"",
        "truncated header": content[:100],
        "truncated data": content[:-10],
        "other format": b"PK\x03\x04" + content,
        "absurd header length": b"\xff" * 8 + content[8:],
    }
    file.write_bytes(damaged[how])


@pytest.mark.parametrize(
    "how", ["empty", "truncated header", "truncated data", "other format", "absurd header length"]
)
def test_a_damaged_file_is_named(how: str, make_model: Make, tmp_path: Path) -> None:
    make_model("llama").save(tmp_path)
    damage(tmp_path / "model.safetensors", how)
    with pytest.raises(CorruptFileError, match=r"model\.safetensors: not a whole safetensors file"):
        HfModel.open(tmp_path)


def test_a_tensor_type_that_is_not_implemented_is_named(make_model: Make, tmp_path: Path) -> None:
    model = make_model("llama")
    model.tensors["model.norm.weight"] = model.tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedModelError, match=r"'model\.norm\.weight' has type float8_e4m3fn"):
        HfModel.open(model.save(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_way_out(name: str, make_model: Make, tmp_path: Path) -> None:
    make_model("llama").save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"never loaded.*convert them to safetensors"):
        HfModel.open(tmp_path)


def test_a_directory_without_weights_is_an_error(make_model: Make, tmp_path: Path) -> None:
    make_model("llama").save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        HfModel.open(tmp_path)


def test_a_single_file_of_another_name_is_taken(make_model: Make, tmp_path: Path) -> None:
    make_model("llama").save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert HfModel.open(tmp_path).shards == (tmp_path / "weights.safetensors",)


def test_several_files_without_an_index_are_an_error(make_model: Make, tmp_path: Path) -> None:
    shard(make_model("llama"), tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files but no model\.safetensors\.index\.json"):
        HfModel.open(tmp_path)


def test_a_directory_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        HfModel.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "llama"', "\xff", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CorruptFileError, match=r"config\.json"):
        HfModel.open(tmp_path)
