"""``config.json`` -> ``ModelConfig``, against transformers' own configuration classes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from astrai_triton.checkpoint.hf import parse_config
from astrai_triton.errors import CorruptFileError, UnsupportedModelError
from astrai_triton.model.config import RopeConfig

Make = Callable[..., dict[str, Any]]

# What the hub's config.json of SmolLM2-135M-Instruct says, in the form of transformers 4.
SMOLLM2 = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
MINIMAL = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}


def windows(config: dict[str, Any]) -> list[int]:
    return [layer.window for layer in parse_config(config).layers]


def rope(config: dict[str, Any]) -> RopeConfig:
    return parse_config(config).layers[0].rope


def with_rope(scaling: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", **MINIMAL, "rope_scaling": scaling, **changes}


def test_smollm2_is_read_as_published() -> None:
    config = parse_config(SMOLLM2)
    assert (config.arch, config.n_layers, config.hidden_size, config.vocab_size) == ("llama", 30, 576, 49152)
    assert (config.n_q_heads, config.n_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_embeddings
    assert config.norm_eps == 1e-5
    assert config.pairing == "half"
    assert config.layers[0].rope == RopeConfig(rotary_dim=64, base=100000.0)


def test_what_transformers_writes_is_read_back_for_every_architecture(arch: str, make_config: Make) -> None:
    written = make_config(arch)
    config = parse_config(written)
    assert config.arch == arch
    assert config.vocab_size == written["vocab_size"]
    assert config.hidden_size == written["hidden_size"]
    assert config.intermediate_size == written["intermediate_size"]
    assert config.n_layers == written["num_hidden_layers"]
    assert config.n_q_heads == written["num_attention_heads"]
    assert config.n_kv_heads == written["num_key_value_heads"]
    assert config.head_dim == written["head_dim"]
    assert config.max_seq_len == written["max_position_embeddings"]
    assert config.norm_eps == written["rms_norm_eps"]
    assert config.tie_embeddings == written["tie_word_embeddings"] == arch.startswith("gemma")
    assert config.qk_norm == (arch in ("qwen3", "gemma3"))
    assert config.qkv_bias == (arch == "qwen2")
    assert not config.o_bias
    assert not config.mlp_bias
    assert config.post_norms == arch.startswith("gemma")
    assert config.activation == ("gelu_tanh" if arch.startswith("gemma") else "silu")


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma2", "Gemma3Text"])
def test_an_absent_key_takes_the_default_of_transformers(name: str) -> None:
    import transformers

    given = {**MINIMAL, "hidden_size": 512, "num_attention_heads": 32}
    full = getattr(transformers, f"{name}Config")(**given).to_dict()
    sparse = {"model_type": full["model_type"], **given}
    assert parse_config(sparse) == parse_config(full)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3"])
def test_null_kv_heads_are_as_many_as_q_heads(name: str) -> None:
    config = {"model_type": name.lower(), **MINIMAL, "num_key_value_heads": None}
    assert parse_config(config).n_kv_heads == MINIMAL["num_attention_heads"]


def test_gemma_scales_embeddings_and_scores() -> None:
    config = parse_config({"model_type": "gemma2", **MINIMAL, "query_pre_attn_scalar": 144})
    assert config.embed_scale == 8.0
    assert config.softmax_scale == pytest.approx(1 / 12)
    assert (config.attn_softcap, config.logit_softcap) == (50.0, 30.0)


def test_a_null_softcap_is_off() -> None:
    config = {
        "model_type": "gemma2",
        **MINIMAL,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    parsed = parse_config(config)
    assert (parsed.attn_softcap, parsed.logit_softcap) == (0.0, 0.0)


def test_gemma3_nests_its_text_config() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 12,
    }
    config = parse_config({"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}})
    assert (config.vocab_size, config.n_q_heads, config.n_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.tie_embeddings
    assert [layer.window for layer in config.layers] == [1024, 1024, 1024, 1024, 1024, -1] * 2


@pytest.mark.parametrize("form", ["transformers 4", "transformers 5"])
def test_gemma3_has_one_rope_for_local_and_one_for_global_layers(form: str) -> None:
    written: dict[str, Any] = {"model_type": "gemma3_text", **MINIMAL, "head_dim": 16}
    if form == "transformers 4":
        written |= {
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8},
        }
    else:
        written["rope_parameters"] = {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    layers = parse_config(written).layers
    assert layers[0].rope == RopeConfig(rotary_dim=16, base=2e4)
    assert layers[5].rope == RopeConfig(rotary_dim=16, base=5e5, scaling="linear", factor=8.0)


def test_mistral_uses_its_window_unless_null() -> None:
    mistral = {"model_type": "mistral", **MINIMAL, "num_key_value_heads": 2}
    assert windows({**mistral, "sliding_window": 100}) == [100] * 8
    assert windows({**mistral, "sliding_window": None}) == [-1] * 8


def test_llama_ignores_a_window() -> None:
    assert windows({"model_type": "llama", **MINIMAL, "sliding_window": 100}) == [-1] * 8


def test_qwen2_uses_its_window_only_when_told_and_from_max_window_layers_on() -> None:
    qwen = {
        "model_type": "qwen2",
        **MINIMAL,
        "num_key_value_heads": 2,
        "sliding_window": 100,
        "max_window_layers": 6,
    }
    assert windows(qwen) == [-1] * 8
    assert windows({**qwen, "use_sliding_window": True}) == [-1] * 6 + [100] * 2


def test_layer_types_decide_where_they_are_given() -> None:
    types = ["full_attention", "sliding_attention"] * 4
    qwen = {"model_type": "qwen3", **MINIMAL, "num_key_value_heads": 2, "use_sliding_window": True}
    assert windows({**qwen, "sliding_window": 9, "layer_types": types}) == [-1, 9] * 4


def test_gemma2_alternates_beginning_with_a_window() -> None:
    assert windows({"model_type": "gemma2", **MINIMAL, "sliding_window": 9}) == [9, -1] * 4


def test_gemma3_takes_its_pattern() -> None:
    gemma = {"model_type": "gemma3_text", **MINIMAL, "sliding_window": 9, "sliding_window_pattern": 4}
    assert windows(gemma) == [9, 9, 9, -1] * 2


def test_attention_bias_is_on_all_four_projections() -> None:
    config = parse_config({"model_type": "llama", **MINIMAL, "attention_bias": True, "mlp_bias": True})
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read_from_both_forms(key: str) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    written = {"model_type": "llama", **MINIMAL, "max_position_embeddings": 131072, key: llama3}
    if key == "rope_parameters":
        llama3["rope_theta"] = 500000.0
    else:
        written["rope_theta"] = 500000.0
    assert rope(written) == RopeConfig(
        rotary_dim=16,
        base=500000.0,
        scaling="llama3",
        factor=8.0,
        original_max_len=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


def test_yarn_takes_its_options_and_extends_the_context() -> None:
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1000,
        "beta_fast": 16,
        "mscale": 0.7,
    }
    written = with_rope(scaling, max_position_embeddings=1000)
    assert rope(written) == RopeConfig(
        rotary_dim=16, scaling="yarn", factor=4.0, original_max_len=1000, beta_fast=16.0, mscale=0.7
    )
    assert parse_config(written).max_seq_len == 4000


def test_yarn_without_factor_takes_the_ratio_of_lengths() -> None:
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 500}
    assert rope(with_rope(scaling, max_position_embeddings=2000)).factor == 4.0


def test_dynamic_scaling_begins_where_the_declared_context_ends() -> None:
    written = with_rope({"type": "dynamic", "factor": 2.0}, max_position_embeddings=512)
    assert rope(written) == RopeConfig(rotary_dim=16, scaling="dynamic", factor=2.0, original_max_len=512)
    assert parse_config(written).max_seq_len == 1024


def test_linear_scaling_is_read() -> None:
    assert rope(with_rope({"type": "linear", "factor": 2.5})) == RopeConfig(
        rotary_dim=16, scaling="linear", factor=2.5
    )


def test_a_partial_rotary_factor_shortens_the_rotary_part() -> None:
    assert rope({"model_type": "phi3", **MINIMAL, "partial_rotary_factor": 0.75}).rotary_dim == 12


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope", "ntk-by-parts"])
def test_an_unknown_rope_type_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"rope type '{kind}'.*choices: default, linear"):
        parse_config(with_rope({"rope_type": kind, "factor": 2.0}))


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi3s_long_context_scaling_is_refused_under_each_of_its_names(kind: str) -> None:
    scaling = {"type": kind, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    with pytest.raises(UnsupportedModelError, match=f"rope type '{kind}'"):
        parse_config({"model_type": "phi3", **MINIMAL, "rope_scaling": scaling})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba'.*choices: llama, mistral"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
        (
            {"model_type": "mistral", "layer_types": ["chunked_attention"] * 8},
            "layer type 'chunked_attention'",
        ),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedModelError, match=told):
        parse_config({"model_type": "llama", **MINIMAL, **change})


@pytest.mark.parametrize("key", ["model_type", *MINIMAL])
def test_a_missing_required_key_is_named(key: str) -> None:
    config = {"model_type": "llama", **MINIMAL}
    del config[key]
    with pytest.raises(CorruptFileError, match=f"required key '{key}' is missing"):
        parse_config(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("hidden_size", -1),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 0),
        ("vocab_size", 40.5),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", 0),
        ("rope_theta", -1.0),
        ("tie_word_embeddings", "yes"),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "linear", "factor": 0.5}),
        ("rope_scaling", {"type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "yarn", "factor": math.inf}),
        ("quantization_config", 3),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_an_error(key: str, value: Any) -> None:
    with pytest.raises(CorruptFileError):
        parse_config({"model_type": "llama", **MINIMAL, key: value})


def test_layer_types_must_cover_every_layer() -> None:
    config = {"model_type": "mistral", **MINIMAL, "num_key_value_heads": 2, "layer_types": ["full_attention"]}
    with pytest.raises(CorruptFileError, match="wanted num_hidden_layers=8 entries, got 1"):
        parse_config(config)


def test_the_file_is_named_in_errors() -> None:
    with pytest.raises(CorruptFileError, match=r"^some/config\.json: "):
        parse_config(json.loads("{}"), "some/config.json")
