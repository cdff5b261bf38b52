"""GGUF metadata -> ``ModelConfig``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from astrai_triton.checkpoint.gguf_config import parse_gguf_config
from astrai_triton.checkpoint.gguf_file import GgufFile
from astrai_triton.checkpoint.hf import parse_config
from astrai_triton.errors import CorruptFileError, UnsupportedModelError
from astrai_triton.model.config import ModelConfig, RopeConfig

Make = Callable[..., Any]
Write = Callable[..., Path]


def read(path: Path) -> ModelConfig:
    return parse_gguf_config(GgufFile(path))


def windows(path: Path) -> list[int]:
    return [layer.window for layer in read(path).layers]


def test_the_configuration_is_that_of_the_same_models_config_json(
    arch: str, make_model: Make, write_gguf: Write
) -> None:
    model = make_model(arch)
    got, wanted = read(write_gguf(arch, model=model)), parse_config(model.config)
    stored_as_llama = arch in ("llama", "mistral")
    assert got == attrs.evolve(
        wanted,
        arch="llama" if stored_as_llama else arch,
        pairing="adjacent" if stored_as_llama else "half",
    )


def test_float32_numbers_read_as_the_decimal_that_was_meant(write_gguf: Write) -> None:
    assert read(write_gguf(keys={"attention.layer_norm_rms_epsilon": 1e-5})).norm_eps == 1e-5


def test_a_missing_output_means_tied_embeddings(write_gguf: Write) -> None:
    assert read(write_gguf(drop=("output.weight",))).tie_embeddings


def test_head_dim_and_kv_heads_have_defaults(write_gguf: Write) -> None:
    drop = (
        "attention.key_length",
        "attention.value_length",
        "attention.head_count_kv",
        "rope.dimension_count",
    )
    config = read(write_gguf(drop=drop))
    assert (config.head_dim, config.n_kv_heads, config.layers[0].rope.rotary_dim) == (8, 4, 8)


def test_a_number_given_per_layer_is_taken_if_it_is_the_same_everywhere(write_gguf: Write) -> None:
    assert read(write_gguf(keys={"attention.head_count_kv": [2, 2]})).n_kv_heads == 2
    with pytest.raises(
        UnsupportedModelError, match=r"llama\.attention\.head_count_kv differs between layers"
    ):
        read(write_gguf(keys={"attention.head_count_kv": [2, 1]}))


def test_biases_are_seen_in_the_tensors(write_gguf: Write) -> None:
    tensors = {"blk.0.attn_q.bias": np.zeros(32), "blk.0.attn_output.bias": np.zeros(32)}
    config = read(write_gguf(tensors=tensors))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, False)


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_gemmas_largest_models_scale_scores_by_hidden_size(arch: str, layers: int, write_gguf: Write) -> None:
    config = read(write_gguf(arch, keys={"block_count": layers, "attention.head_count": 2}))
    assert config.softmax_scale == pytest.approx(1 / math.sqrt(32 / 2))


def test_a_scale_in_the_file_is_taken(write_gguf: Write) -> None:
    assert read(write_gguf(keys={"attention.scale": 0.25})).softmax_scale == 0.25


def test_gemma2_alternates_beginning_with_its_default_window(write_gguf: Write) -> None:
    path = write_gguf("gemma2", keys={"block_count": 5}, drop=("attention.sliding_window",))
    assert windows(path) == [4096, -1, 4096, -1, 4096]


def test_gemma3_is_global_in_every_sixth_layer_with_another_base(write_gguf: Write) -> None:
    keys = {
        "block_count": 7,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    layers = read(write_gguf("gemma3", keys=keys)).layers
    assert [layer.window for layer in layers] == [16, 16, 16, 16, 16, -1, 16]
    assert layers[0].rope == RopeConfig(rotary_dim=8, base=1e4)
    assert layers[5].rope == RopeConfig(rotary_dim=8, base=1e6, scaling="linear", factor=8.0)


@pytest.mark.parametrize("pattern", [3, [True, True, False, True]])
def test_a_window_pattern_is_a_period_or_a_list(pattern: Any, write_gguf: Write) -> None:
    keys = {"block_count": 4, "attention.sliding_window_pattern": pattern}
    assert windows(write_gguf("gemma3", keys=keys)) == [16, 16, -1, 16]


def test_a_window_pattern_must_cover_every_layer(write_gguf: Write) -> None:
    with pytest.raises(CorruptFileError, match="sliding_window_pattern: wanted 2 entries, got 3"):
        read(write_gguf("gemma3", keys={"attention.sliding_window_pattern": [True, False, True]}))


def test_phi3_has_a_window_in_every_layer_and_zero_is_none(write_gguf: Write) -> None:
    assert windows(write_gguf("phi3", keys={"attention.sliding_window": 20})) == [20, 20]
    assert windows(write_gguf("phi3", keys={"attention.sliding_window": 0})) == [-1, -1]


def test_linear_scaling_is_read(write_gguf: Write) -> None:
    for keys in (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
    ):
        config = read(write_gguf(keys=keys))
        assert config.layers[0].rope == RopeConfig(rotary_dim=8, scaling="linear", factor=4.0)


def test_yarn_is_read(write_gguf: Write) -> None:
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_beta_fast": 16.0,
    }
    config = read(write_gguf("qwen2", keys=keys))
    assert config.layers[0].rope == RopeConfig(
        rotary_dim=8, scaling="yarn", factor=4.0, original_max_len=32, beta_fast=16.0
    )
    assert config.max_seq_len == 128


def test_yarns_attention_factor_comes_on_top_of_the_derived_one(write_gguf: Write) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5}
    factor = read(write_gguf("qwen2", keys=keys)).layers[0].rope.attention_factor
    assert factor == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))


def test_stored_frequency_divisors_replace_scaling(write_gguf: Write) -> None:
    path = write_gguf(tensors={"rope_freqs.weight": np.array([1.0, 1.0, 2.5, 8.0])})
    assert read(path).layers[1].rope == RopeConfig(rotary_dim=8, freq_factors=(1.0, 1.0, 2.5, 8.0))


@pytest.mark.parametrize("divisors", [[1.0] * 3, [1.0, 1.0, 0.0, 8.0], [1.0, 1.0, math.nan, 8.0]])
def test_senseless_frequency_divisors_are_an_error(divisors: list[float], write_gguf: Write) -> None:
    with pytest.raises(CorruptFileError, match="rope_freqs"):
        read(write_gguf(tensors={"rope_freqs.weight": np.array(divisors)}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"keys": {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}}, "rope scaling 'longrope'"),
        ({"tensors": {"rope_factors_long.weight": np.ones(4)}}, "rope scaling 'longrope'"),
        ({"keys": {"expert_count": 8}}, r"llama\.expert_count"),
        ({"keys": {"rope.scaling.yarn_log_multiplier": 0.1}}, "yarn_log_multiplier"),
        ({"keys": {"attention.value_length": 4}}, "keys and values of different length"),
        ({"keys": {"rope.dimension_count": 4}}, r"partial rotary embedding \(4 of 8\)"),
        ({"general": {"general.type": "adapter"}}, "holds a 'adapter', wanted a model"),
        ({"general": {"split.count": 3}}, "one part of a split GGUF"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    change: dict[str, Any], told: str, write_gguf: Write
) -> None:
    with pytest.raises(UnsupportedModelError, match=told):
        read(write_gguf(**change))


def test_an_unknown_architecture_is_refused_with_the_choices(write_gguf: Write) -> None:
    path = write_gguf()
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(
        UnsupportedModelError, match="architecture 'mamba' is not implemented; choices: llama, qwen2"
    ):
        read(path)


@pytest.mark.parametrize(
    "key",
    [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_key_is_named(key: str, write_gguf: Write) -> None:
    with pytest.raises(CorruptFileError, match=rf"required key 'llama\.{key}' is missing"):
        read(write_gguf(drop=(key,)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"keys": {"block_count": 2**31}}, "block_count"),
        ({"keys": {"embedding_length": "32"}}, "embedding_length"),
        ({"keys": {"embedding_length": 64}}, r"token_embd\.weight: wanted shape \[vocabulary, 64\]"),
        ({"keys": {"attention.head_count_kv": 3}}, "n_kv_heads=3"),
        ({"keys": {"rope.scaling.type": "yarn"}}, "rope.scaling.factor"),
        ({"keys": {"attn_logit_softcapping": -1.0}}, "attn_logit_softcapping"),
        ({"drop": ("token_embd.weight",)}, r"'token_embd\.weight' is missing"),
        (
            {"general": {"tokenizer.ggml.tokens": ["x"] * 41}},
            "tokenizer has 41 tokens, the embedding 40 rows",
        ),
    ],
)
def test_contradictions_are_errors(change: dict[str, Any], told: str, write_gguf: Write) -> None:
    with pytest.raises(CorruptFileError, match=told):
        read(write_gguf(**change))
