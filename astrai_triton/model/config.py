"""What a decoder-only transformer is, as data. One frozen config drives one implementation."""

from __future__ import annotations

from typing import Any, Literal, get_args

import attrs
from attrs import validators

RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn"]
RopePairing = Literal["half", "adjacent"]
Activation = Literal["silu", "gelu_tanh"]


def _one_of(choices: Any) -> Any:
    return validators.in_(get_args(choices))


def _check_window(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value != -1 and value < 1:
        raise ValueError(f"{attribute.name}: wanted >= 1, or -1 for no window, got {value}")


@attrs.frozen(kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), the Llama 3.1 model card for ``llama3``.

    Raises:
        ValueError: a field is out of range, or one that ``scaling`` needs is not given.
    """

    rotary_dim: int
    """Leading elements of a head that are rotated; even, <= head_dim."""
    base: float = attrs.field(default=10000.0, validator=validators.gt(0.0))
    scaling: RopeScaling = attrs.field(default="none", validator=_one_of(RopeScaling))
    factor: float = attrs.field(default=1.0, validator=validators.ge(1.0))
    """Context extension factor of every scaling but ``none``."""
    original_max_len: int = 0
    """Context the model was trained at, before scaling (llama3, yarn, dynamic)."""
    low_freq_factor: float = 1.0
    """llama3 only."""
    high_freq_factor: float = 4.0
    """llama3 only; above ``low_freq_factor``."""
    beta_fast: float = attrs.field(default=32.0, validator=validators.gt(0.0))
    """yarn only."""
    beta_slow: float = attrs.field(default=1.0, validator=validators.gt(0.0))
    """yarn only."""
    attention_factor: float | None = None
    """yarn only: multiplies cos and sin; None derives it from ``factor`` (and mscale where given)."""
    mscale: float | None = None
    """yarn only."""
    mscale_all_dim: float | None = None
    """yarn only."""
    truncate: bool = True
    """yarn only: round the correction range to whole dimensions."""
    freq_factors: tuple[float, ...] | None = None
    """``rotary_dim/2`` divisors of the frequencies (``rope_freqs`` of a GGUF); replaces ``scaling``."""

    def __attrs_post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim: wanted an even number >= 2, got {self.rotary_dim}")
        if self.scaling in ("dynamic", "llama3", "yarn") and self.original_max_len < 1:
            raise ValueError(
                f"original_max_len: wanted >= 1 with scaling {self.scaling!r}, got {self.original_max_len}"
            )
        if self.scaling == "dynamic" and self.rotary_dim < 4:
            raise ValueError(f"rotary_dim: wanted >= 4 with scaling 'dynamic', got {self.rotary_dim}")
        if self.scaling == "llama3" and not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor: wanted between 0 and high_freq_factor={self.high_freq_factor}, "
                f"got {self.low_freq_factor}"
            )
        factors = self.freq_factors
        if factors is not None and (len(factors) != self.rotary_dim // 2 or min(factors) <= 0.0):
            raise ValueError(
                f"freq_factors: wanted rotary_dim/2 = {self.rotary_dim // 2} positive numbers, "
                f"got {len(factors)}, the smallest {min(factors, default=0.0)}"
            )


@attrs.frozen(kw_only=True)
class LayerConfig:
    """What differs from layer to layer."""

    window: int = attrs.field(default=-1, validator=_check_window)
    """Sliding window: a row sees itself and ``window - 1`` keys before it; -1 is unbounded."""
    rope: RopeConfig


@attrs.frozen(kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    Raises:
        ValueError: a field is out of range or two fields contradict each other.
    """

    arch: str
    """llama, mistral, qwen2, qwen3, phi3, gemma2, gemma3."""
    vocab_size: int = attrs.field(validator=validators.gt(0))
    hidden_size: int = attrs.field(validator=validators.gt(0))
    intermediate_size: int = attrs.field(validator=validators.gt(0))
    n_q_heads: int = attrs.field(validator=validators.gt(0))
    n_kv_heads: int = attrs.field(validator=validators.gt(0))
    head_dim: int = attrs.field(validator=validators.gt(0))
    max_seq_len: int = attrs.field(validator=validators.gt(0))
    """Longest context the checkpoint declares."""
    norm_eps: float = attrs.field(default=1e-5, validator=validators.ge(0.0))
    activation: Activation = attrs.field(default="silu", validator=_one_of(Activation))
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before rotary (Qwen3, Gemma 3)."""
    post_norms: bool = False
    """A second norm after attention and after the MLP (Gemma 2/3)."""
    sinks: bool = False
    """One learned logit per q head joins the softmax denominator."""
    embed_scale: float = 1.0
    """Multiplies embeddings (Gemma: sqrt(hidden_size)), rounded to the dtype of the model first."""
    softmax_scale: float | None = None
    """None is 1/sqrt(head_dim)."""
    attn_softcap: float = attrs.field(default=0.0, validator=validators.ge(0.0))
    """0 is off; otherwise scores become cap * tanh(scores / cap)."""
    logit_softcap: float = attrs.field(default=0.0, validator=validators.ge(0.0))
    """The same for the LM head."""
    pairing: RopePairing = attrs.field(default="half", validator=_one_of(RopePairing))
    """Which elements rotary pairs in the q/k weights at hand: (i, i + rotary_dim/2) or (2i, 2i + 1)."""
    layers: tuple[LayerConfig, ...] = attrs.field(validator=validators.min_len(1))

    def __attrs_post_init__(self) -> None:
        if self.n_q_heads % self.n_kv_heads:
            raise ValueError(
                f"n_q_heads: wanted a multiple of n_kv_heads={self.n_kv_heads}, got {self.n_q_heads}"
            )
        rotary_dims = {layer.rope.rotary_dim for layer in self.layers}
        if max(rotary_dims) > self.head_dim:
            raise ValueError(
                f"rotary_dim: wanted an even number in 2..{self.head_dim}, got {max(rotary_dims)}"
            )
        if len(rotary_dims) > 1:
            raise ValueError(f"rotary_dim: wanted one for all layers, got {sorted(rotary_dims)}")

    @property
    def n_layers(self) -> int:
        """Number of transformer layers."""
        return len(self.layers)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token holds over all layers; times the item size gives bytes."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim
