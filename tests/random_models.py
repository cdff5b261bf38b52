"""Tiny decoders with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from astrai_triton.model import Decoder, LayerConfig, ModelConfig, RopeConfig

ROPE = RopeConfig(rotary_dim=8, base=10000.0)
VARIANTS = {
    "plain": {},
    "partial rotary": {"layers": (LayerConfig(rope=RopeConfig(rotary_dim=4)),) * 2},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tie_embeddings": True},
    "gemma": {
        "layers": (
            LayerConfig(rope=ROPE, window=5),
            LayerConfig(rope=RopeConfig(rotary_dim=8, base=1e6, scaling="linear", factor=8.0)),
        ),
        "qk_norm": True,
        "post_norms": True,
        "embed_scale": 24**0.5,
        "activation": "gelu_tanh",
        "attn_softcap": 5.0,
        "logit_softcap": 3.0,
        "softmax_scale": 0.2,
        "tie_embeddings": True,
    },
    "sinks": {"sinks": True, "layers": (LayerConfig(rope=ROPE, window=3), LayerConfig(rope=ROPE))},
}
"""Changes to ``small_config`` that together use every field."""


def small_config(**changes: Any) -> ModelConfig:
    """Two layers, grouped heads, a head_dim that is not hidden_size / n_q_heads."""
    fields: dict[str, Any] = {
        "arch": "llama",
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 40,
        "n_q_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "max_seq_len": 64,
        "layers": (LayerConfig(rope=ROPE),) * 2,
    }
    return ModelConfig(**{**fields, **changes})


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every canonical tensor of ``config``, float32, of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * scale + offset
        for name, shape, scale, offset in _tensors(config)
    }


def _tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """Name, shape, standard deviation and mean."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.n_q_heads * head_dim, config.n_kv_heads * head_dim

    def linear(
        name: str, rows: int, columns: int, bias: bool
    ) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
        yield f"{name}.weight", (rows, columns), 1.5 * columns**-0.5, 0.0
        if bias:
            yield f"{name}.bias", (rows,), 0.3, 0.0

    def norm(name: str, size: int) -> tuple[str, tuple[int, ...], float, float]:
        return f"{name}.weight", (size,), 0.3, 1.0

    yield "embed.weight", (config.vocab_size, hidden), 0.5, 0.0
    for idx in range(config.n_layers):
        layer = f"layers.{idx}"
        yield norm(f"{layer}.attn_norm", hidden)
        yield norm(f"{layer}.mlp_norm", hidden)
        if config.post_norms:
            yield norm(f"{layer}.post_attn_norm", hidden)
            yield norm(f"{layer}.post_mlp_norm", hidden)
        yield from linear(f"{layer}.attn.q", q_rows, hidden, config.qkv_bias)
        yield from linear(f"{layer}.attn.k", kv_rows, hidden, config.qkv_bias)
        yield from linear(f"{layer}.attn.v", kv_rows, hidden, config.qkv_bias)
        yield from linear(f"{layer}.attn.o", hidden, q_rows, config.o_bias)
        if config.qk_norm:
            yield norm(f"{layer}.attn.q_norm", head_dim)
            yield norm(f"{layer}.attn.k_norm", head_dim)
        if config.sinks:
            yield f"{layer}.attn.sinks", (config.n_q_heads,), 1.0, 0.0
        yield from linear(f"{layer}.mlp.gate", inner, hidden, config.mlp_bias)
        yield from linear(f"{layer}.mlp.up", inner, hidden, config.mlp_bias)
        yield from linear(f"{layer}.mlp.down", hidden, inner, config.mlp_bias)
    yield norm("norm", hidden)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden), 1.5 * hidden**-0.5, 0.0


def random_decoder(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    change: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> Decoder:
    """A decoder on the CPU with ``random_weights``, which ``change`` may alter first."""
    weights = random_weights(config, seed)
    if change is not None:
        change(weights)
    decoder = Decoder(config, dtype=dtype, device="cpu")
    decoder.load_weights(weights.items())
    return decoder


def dense_logits(decoder: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[L, vocab]`` of one sequence ``[L]`` from position 0, without a cache."""
    logits: torch.Tensor = decoder(token_ids[None], torch.arange(len(token_ids))[None])
    return logits[0]


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over largest magnitude."""
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())
