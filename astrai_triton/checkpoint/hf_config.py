"""``config.json`` of a Hugging Face checkpoint -> ``ModelConfig``.

Reads what transformers 4 writes (``rope_theta``, ``rope_scaling``) and what transformers 5 writes
(``rope_parameters``). An optional key that is absent takes the default transformers has for the architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from astrai_triton.checkpoint.fields import REQUIRED, Fields, Required
from astrai_triton.errors import CorruptFileError, UnsupportedModelError
from astrai_triton.model.config import Activation, LayerConfig, ModelConfig, RopeConfig, RopeScaling

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ROPE_TYPES: Mapping[str, RopeScaling] = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
}
MAX_LAYERS = 4096
"""More layers than this are taken for a damaged file."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


@attrs.frozen(kw_only=True)
class _Family:
    """What an architecture takes for a key its ``config.json`` leaves out.

    None means that the key is required, except: ``n_kv_heads`` None is as many as q heads, ``head_dim`` None
    is hidden_size / n_q_heads, ``window`` None is no window.
    """

    arch: str
    vocab_size: int | None = None
    n_q_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    max_len: int
    norm_eps: float = 1e-6
    window: int | None = None
    tied: bool = False
    gemma: bool = False
    qk_norm: bool = False
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0


_GEMMA3 = _Family(
    arch="gemma3",
    vocab_size=262208,
    n_q_heads=8,
    n_kv_heads=4,
    head_dim=256,
    max_len=131072,
    window=4096,
    tied=True,
    gemma=True,
    qk_norm=True,
)
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(arch="llama", max_len=2048),
    "mistral": _Family(arch="mistral", n_kv_heads=8, max_len=131072, window=4096),
    "qwen2": _Family(arch="qwen2", n_kv_heads=32, max_len=32768, window=4096),
    "qwen3": _Family(arch="qwen3", n_kv_heads=32, head_dim=128, max_len=32768, window=4096, qk_norm=True),
    "phi3": _Family(arch="phi3", max_len=4096, norm_eps=1e-5),
    "gemma2": _Family(
        arch="gemma2",
        n_kv_heads=4,
        head_dim=256,
        max_len=8192,
        window=4096,
        tied=True,
        gemma=True,
        attn_softcap=50.0,
        logit_softcap=30.0,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
}


def parse_config(config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Turn a parsed ``config.json`` into a model configuration with half-split rotary pairing.

    Args:
        config: the JSON object; for multimodal Gemma 3 its ``text_config`` is read.
        source: how error texts name the file.

    Raises:
        UnsupportedModelError: an architecture, activation, rope type, layer type or quantisation that is not
            implemented.
        CorruptFileError: a required key is missing or a value has the wrong type or range.
    """
    outer = Fields(config, source)
    model_type = outer.text("model_type")
    family = _FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"{source}: architecture {model_type!r} is not implemented; choices: {', '.join(_FAMILIES)}"
        )
    _refuse_quantised(outer)
    fields = (outer.section("text_config") or outer) if model_type == "gemma3" else outer
    tied = outer if outer.has("tie_word_embeddings") else fields
    try:
        return _build(family, fields, tie_embeddings=tied.flag("tie_word_embeddings", family.tied))
    except ValueError as error:
        raise CorruptFileError(f"{source}: {error}") from error


def _refuse_quantised(fields: Fields) -> None:
    quantised = fields.section("quantization_config")
    if quantised is not None:
        method = quantised.text("quant_method", "unknown")
        raise UnsupportedModelError(
            f"{fields.source}: weights quantised with {method!r} are not implemented; "
            "use the unquantised safetensors or a GGUF of the model"
        )


def _build(family: _Family, fields: Fields, *, tie_embeddings: bool) -> ModelConfig:
    hidden_size = fields.integer("hidden_size")
    n_q_heads = fields.integer("num_attention_heads", _or_required(family.n_q_heads))
    head_dim = fields.integer("head_dim", family.head_dim or hidden_size // n_q_heads)
    attention_bias = family.arch in ("llama", "qwen3", "gemma2", "gemma3") and fields.flag(
        "attention_bias", False
    )
    max_len = fields.integer("max_position_embeddings", family.max_len)
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{fields.source}: bidirectional attention is not implemented")
    layers = _layers(family, fields, head_dim, max_len)
    return ModelConfig(
        arch=family.arch,
        vocab_size=fields.integer("vocab_size", _or_required(family.vocab_size)),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        n_q_heads=n_q_heads,
        n_kv_heads=fields.integer("num_key_value_heads", _default_kv_heads(family, fields, n_q_heads)),
        head_dim=head_dim,
        max_seq_len=max(extended_len(max_len, layer.rope) for layer in layers),
        norm_eps=fields.number("rms_norm_eps", family.norm_eps, above=0.0),
        activation=_activation(family, fields),
        tie_embeddings=tie_embeddings,
        qkv_bias=family.arch == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.arch == "llama" and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        post_norms=family.gemma,
        embed_scale=hidden_size**0.5 if family.gemma else 1.0,
        softmax_scale=fields.number("query_pre_attn_scalar", 256, above=0.0) ** -0.5
        if family.gemma
        else None,
        attn_softcap=_softcap(family, fields, "attn_logit_softcapping", family.attn_softcap),
        logit_softcap=_softcap(family, fields, "final_logit_softcapping", family.logit_softcap),
        pairing="half",
        layers=layers,
    )


def _or_required(default: int | None) -> int | Required:
    return REQUIRED if default is None else default


def _default_kv_heads(family: _Family, fields: Fields, n_q_heads: int) -> int:
    # A null means "as many as q heads" wherever it is written; only an absent key takes the family's number.
    written = "num_key_value_heads" in fields.values
    return n_q_heads if written or family.n_kv_heads is None else family.n_kv_heads


def _activation(family: _Family, fields: Fields) -> Activation:
    key, default = ("hidden_activation", "gelu_pytorch_tanh") if family.gemma else ("hidden_act", "silu")
    name = fields.text(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.source}: {key} {name!r} is not implemented; choices: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _softcap(family: _Family, fields: Fields, key: str, default: float) -> float:
    """0.0 (off) for a null; the default only for an absent key."""
    if not family.gemma or (key in fields.values and not fields.has(key)):
        return 0.0
    cap = fields.number(key, default)
    if cap < 0.0:
        raise CorruptFileError(f"{fields.source}: key {key!r}: wanted a number >= 0, got {cap:g}")
    return cap


def _layers(family: _Family, fields: Fields, head_dim: int, max_len: int) -> tuple[LayerConfig, ...]:
    n_layers = fields.integer("num_hidden_layers", at_most=MAX_LAYERS)
    sliding = _sliding_layers(family, fields, n_layers)
    window = -1
    if any(sliding):
        window = fields.integer("sliding_window", _or_required(family.window))
    ropes = _ropes(family, fields, head_dim, max_len)
    return tuple(
        LayerConfig(
            window=window if local else -1, rope=ropes["sliding_attention" if local else "full_attention"]
        )
        for local in sliding
    )


def _sliding_layers(family: _Family, fields: Fields, n_layers: int) -> list[bool]:
    """Which layers use the sliding window."""
    arch = family.arch
    if arch == "llama":
        return [False] * n_layers
    if arch == "phi3":
        return [fields.has("sliding_window")] * n_layers
    if arch in ("qwen2", "qwen3") and not fields.flag("use_sliding_window", False):
        return [False] * n_layers
    if "sliding_window" in fields.values and not fields.has("sliding_window"):
        return [False] * n_layers
    types = fields.sequence("layer_types")
    if types is not None:
        return _parse_layer_types(types, n_layers, fields.source)
    if arch == "mistral":
        return [True] * n_layers
    if arch in ("qwen2", "qwen3"):
        first = fields.integer("max_window_layers", 28, at_least=0)
        return [layer >= first for layer in range(n_layers)]
    pattern = 2
    if arch == "gemma3":
        key = "_sliding_window_pattern" if fields.has("_sliding_window_pattern") else "sliding_window_pattern"
        pattern = fields.integer(key, 6)
    return [(layer + 1) % pattern != 0 for layer in range(n_layers)]


def _parse_layer_types(types: list[Any], n_layers: int, source: str) -> list[bool]:
    if len(types) != n_layers:
        raise CorruptFileError(
            f"{source}: layer_types: wanted num_hidden_layers={n_layers} entries, got {len(types)}"
        )
    for kind in types:
        if kind not in _LAYER_TYPES:
            raise UnsupportedModelError(
                f"{source}: layer type {kind!r} is not implemented; choices: {', '.join(_LAYER_TYPES)}"
            )
    return [kind == "sliding_attention" for kind in types]


def _ropes(family: _Family, fields: Fields, head_dim: int, max_len: int) -> dict[str, RopeConfig]:
    """The rotary embedding of full and of sliding layers."""
    scaling = fields.section("rope_scaling")
    rope = scaling if scaling is not None and scaling.values else fields.section("rope_parameters")
    if rope is None:
        rope = Fields({}, fields.source)
    sections = {kind: rope.section(kind) for kind in _LAYER_TYPES if kind in rope.values}
    base = fields.number("rope_theta", 1e6 if family.arch == "gemma3" else 1e4, above=0.0)
    bases = {"full_attention": base, "sliding_attention": base}
    if family.arch == "gemma3":
        bases["sliding_attention"] = fields.number("rope_local_base_freq", 1e4, above=0.0)
    if sections:
        return {
            kind: _parse_rope(
                family, fields, sections.get(kind) or Fields({}, rope.source), base, head_dim, max_len
            )
            for kind, base in bases.items()
        }
    full = _parse_rope(family, fields, rope, base, head_dim, max_len)
    if family.arch != "gemma3":
        return {"full_attention": full, "sliding_attention": full}
    local = RopeConfig(rotary_dim=full.rotary_dim, base=bases["sliding_attention"])
    return {"full_attention": full, "sliding_attention": local}


def _parse_rope(
    family: _Family, outer: Fields, rope: Fields, base: float, head_dim: int, max_len: int
) -> RopeConfig:
    kind = rope.text("rope_type" if rope.has("rope_type") else "type", "default")
    # Phi-3 called its per-frequency factors "su" and "yarn" before they were named longrope.
    if kind not in _ROPE_TYPES or (family.arch == "phi3" and kind == "yarn"):
        raise UnsupportedModelError(
            f"{rope.source}: rope type {kind!r} is not implemented for {family.arch}; "
            f"choices: {', '.join(_ROPE_TYPES)}"
        )
    part = rope.number(
        "partial_rotary_factor", outer.number("partial_rotary_factor", 1.0, above=0.0), above=0.0
    )
    plain = RopeConfig(rotary_dim=int(head_dim * part), base=rope.number("rope_theta", base, above=0.0))
    scaling = _ROPE_TYPES[kind]
    if scaling == "none":
        return plain
    if scaling == "linear":
        return attrs.evolve(plain, scaling=scaling, factor=rope.number("factor"))
    if scaling == "dynamic":
        return attrs.evolve(plain, scaling=scaling, factor=rope.number("factor"), original_max_len=max_len)
    trained = rope.integer("original_max_position_embeddings", max_len)
    trained = outer.integer("original_max_position_embeddings", trained)
    if scaling == "llama3":
        return attrs.evolve(
            plain,
            scaling=scaling,
            factor=rope.number("factor"),
            original_max_len=trained,
            low_freq_factor=rope.number("low_freq_factor", above=0.0),
            high_freq_factor=rope.number("high_freq_factor", above=0.0),
        )
    return attrs.evolve(
        plain,
        scaling=scaling,
        factor=rope.number("factor", max_len / trained),
        original_max_len=trained,
        beta_fast=rope.number("beta_fast", 32.0, above=0.0),
        beta_slow=rope.number("beta_slow", 1.0, above=0.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def extended_len(max_len: int, rope: RopeConfig) -> int:
    """Longest context once scaling is in force.

    Dynamic scaling starts where the declared length ends, and YaRN files often keep the length of training.
    """
    if rope.scaling == "dynamic":
        return int(max_len * rope.factor)
    if rope.scaling == "yarn":
        return max(max_len, int(rope.original_max_len * rope.factor))
    return max_len
