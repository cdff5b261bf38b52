"""GGUF metadata -> ``ModelConfig``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from astrai_triton.checkpoint.fields import REQUIRED, Fields, Required
from astrai_triton.checkpoint.gguf_file import GgufFile
from astrai_triton.checkpoint.hf_config import MAX_LAYERS, extended_len
from astrai_triton.errors import CorruptFileError, UnsupportedModelError
from astrai_triton.model.config import LayerConfig, ModelConfig, RopeConfig, RopePairing

# What each architecture's q and k rows are stored for.
_PAIRINGS: Mapping[str, RopePairing] = {
    "llama": "adjacent",
    "qwen2": "half",
    "qwen3": "half",
    "phi3": "half",
    "gemma2": "half",
    "gemma3": "half",
}
# The 27B models of both generations scale scores by hidden_size / n_q_heads instead of head_dim; no key says
# so, the number of layers tells them apart.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA_PATTERNS = {"gemma2": 2, "gemma3": 6}
_FOREIGN_KEYS = (
    "expert_count",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.alpha",
)


def parse_gguf_config(file: GgufFile) -> ModelConfig:
    """Read the model configuration; ``pairing`` is the order the q and k rows have in the file.

    Raises:
        UnsupportedModelError: an architecture, rope scaling or option that is not implemented.
        CorruptFileError: a key is missing or has the wrong type, or metadata and tensors disagree.
    """
    source = str(file.path)
    general = Fields(file.metadata, source, "general.")
    arch = general.text("architecture")
    if arch not in _PAIRINGS:
        raise UnsupportedModelError(
            f"{source}: architecture {arch!r} is not implemented; choices: {', '.join(_PAIRINGS)}"
        )
    if general.text("type", "model") != "model":
        raise UnsupportedModelError(f"{source}: holds a {general.text('type')!r}, wanted a model")
    if Fields(file.metadata, source, "split.").integer("count", 1, at_least=0) > 1:
        raise UnsupportedModelError(
            f"{source}: one part of a split GGUF; join the parts first (llama-gguf-split --merge)"
        )
    fields = Fields(file.metadata, source, f"{arch}.")
    for key in _FOREIGN_KEYS:
        if fields.has(key) and fields.values[fields.prefix + key] != 0:
            raise UnsupportedModelError(f"{source}: key {arch}.{key} is not implemented")
    try:
        return _build(arch, fields, file)
    except ValueError as error:
        raise CorruptFileError(f"{source}: {error}") from error


def _build(arch: str, fields: Fields, file: GgufFile) -> ModelConfig:
    hidden_size = fields.integer("embedding_length")
    n_layers = fields.integer("block_count", at_most=MAX_LAYERS)
    n_q_heads = _uniform(fields, "attention.head_count")
    n_kv_heads = _uniform(fields, "attention.head_count_kv", n_q_heads)
    head_dim = fields.integer("attention.key_length", hidden_size // n_q_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{fields.source}: keys and values of different length are not implemented"
        )
    gemma = arch in _GEMMA_PATTERNS
    max_len = fields.integer("context_length")
    rope = _rope(fields, file, head_dim, max_len)
    if arch == "llama" and rope.rotary_dim != head_dim:
        raise UnsupportedModelError(
            f"{fields.source}: llama with a partial rotary embedding ({rope.rotary_dim} of {head_dim}) "
            "is not implemented"
        )
    return ModelConfig(
        arch=arch,
        vocab_size=_vocab_size(file, hidden_size),
        hidden_size=hidden_size,
        intermediate_size=_uniform(fields, "feed_forward_length"),
        n_q_heads=n_q_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        max_seq_len=extended_len(max_len, rope),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", above=0.0),
        activation="gelu_tanh" if gemma else "silu",
        tie_embeddings="output.weight" not in file.entries,
        # No key tells, the tensors do; qwen2 always has them, so that a missing one is noticed.
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in file.entries,
        o_bias="blk.0.attn_output.bias" in file.entries,
        mlp_bias="blk.0.ffn_down.bias" in file.entries,
        qk_norm=arch in ("qwen3", "gemma3"),
        post_norms=gemma,
        embed_scale=math.sqrt(hidden_size) if gemma else 1.0,
        softmax_scale=_softmax_scale(arch, fields, n_layers, head_dim, hidden_size, n_q_heads),
        attn_softcap=_softcap(fields, "attn_logit_softcapping", 50.0 if arch == "gemma2" else 0.0),
        logit_softcap=_softcap(fields, "final_logit_softcapping", 30.0 if arch == "gemma2" else 0.0),
        pairing=_PAIRINGS[arch],
        layers=_layers(arch, fields, n_layers, rope),
    )


def _uniform(fields: Fields, key: str, default: int | Required = REQUIRED) -> int:
    """An integer that some writers give once per layer."""
    value = fields.values.get(fields.prefix + key)
    if not isinstance(value, list):
        return fields.integer(key, default)
    if len(set(value)) != 1:
        raise UnsupportedModelError(
            f"{fields.source}: {fields.prefix}{key} differs between layers ({value}), "
            "which is not implemented"
        )
    return Fields({key: value[0]}, fields.source).integer(key)


def _vocab_size(file: GgufFile, hidden_size: int) -> int:
    entry = file.entries.get("token_embd.weight")
    if entry is None:
        raise CorruptFileError(
            f"{file.path}: the tensor 'token_embd.weight' is missing; fetch the file again"
        )
    if len(entry.shape) != 2 or entry.shape[1] != hidden_size:
        raise CorruptFileError(
            f"{file.path}: token_embd.weight: wanted shape [vocabulary, {hidden_size}], "
            f"got {list(entry.shape)}"
        )
    vocab_size: int = entry.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise CorruptFileError(
            f"{file.path}: the tokenizer has {len(tokens)} tokens, the embedding {vocab_size} rows; "
            "they belong to different models"
        )
    return vocab_size


def _softmax_scale(
    arch: str, fields: Fields, n_layers: int, head_dim: int, hidden_size: int, n_q_heads: int
) -> float | None:
    scale = fields.number("attention.scale", 0.0)
    if scale > 0.0:
        return scale
    if arch not in _GEMMA_27B_LAYERS:
        return None
    return math.pow(hidden_size / n_q_heads if _GEMMA_27B_LAYERS[arch] == n_layers else head_dim, -0.5)


def _softcap(fields: Fields, key: str, default: float) -> float:
    cap = fields.number(key, default)
    if cap < 0.0:
        raise CorruptFileError(f"{fields.source}: {fields.prefix}{key}: wanted a number >= 0, got {cap:g}")
    return cap


def _layers(arch: str, fields: Fields, n_layers: int, rope: RopeConfig) -> tuple[LayerConfig, ...]:
    window = fields.integer("attention.sliding_window", 4096 if arch == "gemma2" else 0, at_least=0)
    if window == 0:
        return (LayerConfig(rope=rope),) * n_layers
    local_rope = rope
    if arch == "gemma3":
        local_rope = RopeConfig(
            rotary_dim=rope.rotary_dim, base=fields.number("rope.freq_base_swa", 10000.0, above=0.0)
        )
    local, full = LayerConfig(window=window, rope=local_rope), LayerConfig(rope=rope)
    return tuple(local if sliding else full for sliding in _sliding_layers(arch, fields, n_layers))


def _sliding_layers(arch: str, fields: Fields, n_layers: int) -> list[bool]:
    """Which layers use the window: all, all but every n-th, or as a list in the file says."""
    key = "attention.sliding_window_pattern"
    flags: Any = fields.values.get(fields.prefix + key)
    if isinstance(flags, list):
        if len(flags) != n_layers:
            raise CorruptFileError(
                f"{fields.source}: {fields.prefix}{key}: wanted {n_layers} entries, got {len(flags)}"
            )
        return [bool(flag) for flag in flags]
    if flags is None and arch not in _GEMMA_PATTERNS:
        return [True] * n_layers
    pattern = fields.integer(key, _GEMMA_PATTERNS.get(arch, REQUIRED))
    return [(layer + 1) % pattern != 0 for layer in range(n_layers)]


def _rope(fields: Fields, file: GgufFile, head_dim: int, max_len: int) -> RopeConfig:
    plain = RopeConfig(
        rotary_dim=fields.integer("rope.dimension_count", head_dim),
        base=fields.number("rope.freq_base", 10000.0, above=0.0),
    )
    if any(name.startswith("rope_factors_") for name in file.entries):
        raise UnsupportedModelError(f"{fields.source}: rope scaling 'longrope' is not implemented")
    if "rope_freqs.weight" in file.entries:
        factors = file.tensor("rope_freqs.weight").float().flatten().tolist()
        if len(factors) != plain.rotary_dim // 2 or not all(0.0 < factor < math.inf for factor in factors):
            raise CorruptFileError(
                f"{fields.source}: rope_freqs.weight: wanted {plain.rotary_dim // 2} positive numbers, "
                f"got {len(factors)}"
            )
        return attrs.evolve(plain, freq_factors=tuple(factors))
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0))
    kind = fields.text("rope.scaling.type", "linear" if factor > 0.0 else "none")
    if kind == "none":
        return plain
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{fields.source}: rope scaling {kind!r} is not implemented; choices: none, linear, yarn"
        )
    if factor <= 0.0:
        raise CorruptFileError(
            f"{fields.source}: key '{fields.prefix}rope.scaling.factor': wanted a number > 0 for {kind}"
        )
    if kind == "linear":
        return attrs.evolve(plain, scaling="linear", factor=factor)
    attention_factor = fields.optional_number("rope.scaling.attn_factor")
    if attention_factor is not None:
        # The file's number comes on top of what YaRN derives from the factor.
        attention_factor *= 1.0 + 0.1 * math.log(factor)
    return attrs.evolve(
        plain,
        scaling="yarn",
        factor=factor,
        original_max_len=fields.integer("rope.scaling.original_context_length", max_len),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, above=0.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, above=0.0),
        attention_factor=attention_factor,
    )
