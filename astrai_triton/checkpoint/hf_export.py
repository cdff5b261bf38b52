"""``ModelConfig`` -> ``config.json``, the inverse of ``hf_config``."""

from __future__ import annotations

import math
from typing import Any

from astrai_triton.errors import UnsupportedModelError
from astrai_triton.model.config import ModelConfig, RopeConfig

_MODEL_TYPES = {"gemma3": "gemma3_text"}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
# What Llama 3.1 and later were released with. A GGUF keeps only the divisors that follow from it.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_TRAINED = 1.0, 4.0, 8192


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The JSON object that ``hf_config.parse_config`` and transformers 4 and 5 read as ``config``.

    The pairing is not part of it: a Hugging Face directory always holds half-split pairs. Token ids are null,
    they belong to the tokenizer.

    Raises:
        UnsupportedModelError: the architecture's ``config.json`` has no key for something ``config`` says.
    """
    windows = [layer.window for layer in config.layers]
    window = max(windows)
    # A GGUF calls Mistral "llama".
    arch = "mistral" if config.arch == "llama" and window > 0 else config.arch
    full = next((layer.rope for layer in config.layers if layer.window < 0), config.layers[0].rope)
    out: dict[str, Any] = {
        "architectures": [_CLASSES[arch]],
        "model_type": _MODEL_TYPES.get(arch, arch),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_q_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": full.original_max_len if full.scaling == "dynamic" else config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": full.base,
        "rope_scaling": _rope_scaling(full),
        "sliding_window": window if window > 0 else None,
        # Else the class's defaults count, which may lie outside this vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if full.rotary_dim != config.head_dim:
        out["partial_rotary_factor"] = full.rotary_dim / config.head_dim
    out |= _gemma_keys(config) if config.post_norms else {"hidden_act": "silu"}
    out |= _window_keys(arch, windows)
    out |= _bias_keys(arch, config)
    if arch == "phi3":
        out["original_max_position_embeddings"] = full.original_max_len or config.max_seq_len
    return out


def _window_keys(arch: str, windows: list[int]) -> dict[str, Any]:
    sliding = [window > 0 for window in windows]
    if len(set(windows) - {-1}) > 1:
        raise UnsupportedModelError("windows of different length cannot be said in a config.json")
    if arch in ("mistral", "phi3"):
        if any(sliding) and not all(sliding):
            raise UnsupportedModelError(
                f"{arch}: a window in some layers only cannot be said in its config.json"
            )
        return {}
    if arch == "llama":
        return {}
    keys: dict[str, Any] = {
        "layer_types": ["sliding_attention" if local else "full_attention" for local in sliding]
    }
    if arch in ("qwen2", "qwen3"):
        keys["use_sliding_window"] = any(sliding)
    return keys


def _bias_keys(arch: str, config: ModelConfig) -> dict[str, Any]:
    expected = (True, False, False)
    keys: dict[str, Any] = {}
    if arch in ("llama", "qwen3", "gemma2", "gemma3"):
        keys["attention_bias"] = config.qkv_bias
        expected = (config.qkv_bias, config.qkv_bias, config.mlp_bias if arch == "llama" else False)
    elif arch != "qwen2":
        expected = (False, False, False)
    if arch == "llama":
        keys["mlp_bias"] = config.mlp_bias
    got = (config.qkv_bias, config.o_bias, config.mlp_bias)
    if got != expected:
        raise UnsupportedModelError(
            f"{arch}: biases (qkv, o, mlp) = {got} cannot be said in its config.json; wanted {expected}"
        )
    return keys


def _gemma_keys(config: ModelConfig) -> dict[str, Any]:
    scalar = config.head_dim if config.softmax_scale is None else config.softmax_scale**-2
    if not math.isclose(scalar, round(scalar), rel_tol=1e-6):
        raise UnsupportedModelError(f"softmax_scale {config.softmax_scale} is not 1/sqrt of a whole number")
    keys = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scalar),
        "attn_logit_softcapping": config.attn_softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
    }
    local = next((layer.rope for layer in config.layers if layer.window > 0), None)
    if config.arch == "gemma3" and local is not None:
        keys["rope_local_base_freq"] = local.base
    return keys


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.freq_factors is not None:
        return _llama3_scaling(rope)
    if rope.scaling == "none":
        return None
    out: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original_max_len
    if rope.scaling == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = ("attention_factor", "mscale", "mscale_all_dim")
        out |= {key: getattr(rope, key) for key in optional if getattr(rope, key) is not None}
    return out


def _llama3_scaling(rope: RopeConfig) -> dict[str, Any]:
    """Find the ``llama3`` parameters that give the stored divisors."""
    divisors = rope.freq_factors or ()
    factor = float(round(max(divisors)))
    for index, divisor in enumerate(divisors):
        wavelength = 2.0 * math.pi * rope.base ** (2.0 * index / rope.rotary_dim)
        turns = _LLAMA3_TRAINED / wavelength
        share = min(max((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0), 1.0)
        expected = 1.0 / ((1.0 - share) / factor + share)
        if not math.isclose(divisor, expected, rel_tol=1e-4):
            raise UnsupportedModelError(
                f"rope_freqs: divisor {index} is {divisor:g}, which no llama3 scaling of a config.json gives "
                f"(nearest: {expected:g})"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_TRAINED,
    }
