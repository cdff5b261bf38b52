"""Cosines and sines of rotary position embedding, and the two orders of q/k rows it is stored for."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from astrai_triton.model.config import RopeConfig, RopePairing

_INITIAL_LEN = 8192
"""Positions the table holds at first; longer contexts double it when a sequence gets there."""


class RotaryEmbedding(nn.Module):
    """Table of cos and sin by position, in float32 whatever the dtype of the model.

    Angles are computed in float64, so entries are right to 1e-6 up to position 1 000 000. Moving the module
    moves the table; casting it does not touch the table.

    Dynamic NTK scaling recomputes its base as a sequence grows, which would contradict keys that are in the
    KV cache already. Here the base is fixed: the one a sequence of exactly ``max_len`` tokens gets.

    Args:
        rope: what to compute.
        max_len: positions ever asked for, >= 1.
        device: where the table lives.

    Raises:
        ValueError: ``max_len`` is below 1.
    """

    freqs_cis: Tensor
    """``[rows, rotary_dim/2, 2]`` float32, (cos, sin); ``rows`` grows up to ``max_len``."""

    def __init__(self, rope: RopeConfig, max_len: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        if max_len < 1:
            raise ValueError(f"max_len: wanted >= 1, got {max_len}")
        self.rope = rope
        self.max_len = max_len
        # Not a buffer: Module.to(dtype) casts buffers.
        self.freqs_cis = build_freqs_cis(rope, max_len, 0, min(max_len, _INITIAL_LEN)).to(device)
        # A captured CUDA graph goes on reading the table it was captured with.
        self._outgrown: list[Tensor] = []

    def reserve(self, length: int) -> None:
        """Make the table hold positions below ``length``.

        Raises:
            ValueError: ``length`` is above ``max_len``.
        """
        rows = self.freqs_cis.shape[0]
        if length <= rows:
            return
        if length > self.max_len:
            raise ValueError(
                f"length: wanted at most max_len={self.max_len} positions, got {length}; "
                "build the model with a larger max_seq_len"
            )
        more = build_freqs_cis(self.rope, self.max_len, rows, min(self.max_len, max(length, 2 * rows)))
        self._outgrown.append(self.freqs_cis)
        self.freqs_cis = torch.cat((self.freqs_cis, more.to(self.freqs_cis.device)))

    def forward(self, position_ids: Tensor, length: int | None = None) -> Tensor:
        """Look up positions.

        Args:
            position_ids: integers of any shape, in ``[0, length)``.
            length: upper bound known to the caller; None reads it from ``position_ids``, which waits for
                the device.

        Returns:
            ``[*position_ids.shape, rotary_dim/2, 2]`` float32.

        Raises:
            ValueError: ``length`` is above ``max_len``.
        """
        if length is None:
            length = int(position_ids.max()) + 1 if position_ids.numel() else 0
        self.reserve(length)
        return self.freqs_cis[position_ids]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.freqs_cis = self.freqs_cis.to(fn(self.freqs_cis[:0]).device)
        return self


def build_freqs_cis(rope: RopeConfig, max_len: int, start: int, stop: int) -> Tensor:
    """cos and sin for positions ``start`` to ``stop - 1``: ``[stop - start, rotary_dim/2, 2]`` float32.

    Args:
        rope: what to compute.
        max_len: the longest sequence; only dynamic scaling depends on it.
        start: first position, >= 0.
        stop: end of the positions, >= ``start``.
    """
    inv_freq, gain = compute_inv_freq(rope, max_len)
    angles = torch.arange(start, stop, dtype=torch.float64)[:, None] * inv_freq
    table = torch.empty(*angles.shape, 2, dtype=torch.float32)
    table[..., 0] = angles.cos().mul_(gain)
    table[..., 1] = angles.sin().mul_(gain)
    return table


def compute_inv_freq(rope: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """Radians per position of each pair, and the factor on cos and sin.

    Args:
        rope: what to compute.
        max_len: the longest sequence; only dynamic scaling depends on it.

    Returns:
        ``[rotary_dim/2]`` float64 and a number.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    inv_freq = rope.base**-exponents
    if rope.freq_factors is not None:
        return inv_freq / torch.tensor(rope.freq_factors, dtype=torch.float64), 1.0
    if rope.scaling == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.scaling == "dynamic":
        excess = rope.factor * max(max_len / rope.original_max_len, 1.0) - (rope.factor - 1.0)
        base = rope.base * excess ** (rope.rotary_dim / (rope.rotary_dim - 2))
        return base**-exponents, 1.0
    if rope.scaling == "llama3":
        turns = inv_freq * rope.original_max_len / (2.0 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return _blend(inv_freq, rope.factor, kept.clamp(0.0, 1.0)), 1.0
    if rope.scaling == "yarn":
        return _blend(inv_freq, rope.factor, _yarn_kept(rope)), _yarn_gain(rope)
    return inv_freq, 1.0


def _blend(inv_freq: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Slow down by ``factor`` where ``kept`` is 0, not at all where it is 1."""
    return inv_freq * (kept + (1.0 - kept) / factor)


def _yarn_kept(rope: RopeConfig) -> Tensor:
    """Share of each frequency that stays unscaled: 1 for fast pairs, a ramp, 0 for slow ones."""

    def pair_with(turns: float) -> float:
        """Index of the pair that turns so often over the original context."""
        period = rope.original_max_len / (turns * 2.0 * math.pi)
        return rope.rotary_dim * math.log(period) / (2.0 * math.log(rope.base))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rope.rotary_dim - 1.0)
    # The published code widens an empty ramp by this much; models were trained with it.
    width = high - low if high != low else 0.001
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float64)
    return 1.0 - ((pairs - low) / width).clamp(0.0, 1.0)


def _yarn_gain(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temper(mscale: float) -> float:
        return 1.0 + 0.1 * mscale * math.log(rope.factor)

    if rope.mscale and rope.mscale_all_dim:
        return temper(rope.mscale) / temper(rope.mscale_all_dim)
    return temper(1.0)


def permute_pairing(
    tensor: Tensor, n_heads: int, head_dim: int, rotary_dim: int, source: RopePairing, target: RopePairing
) -> Tensor:
    """Reorder the rows of q or k so that the other rotary pairing gives the same scores.

    ``half`` pairs rows (i, i + rotary_dim/2) of a head, ``adjacent`` pairs (2i, 2i + 1). Rows from
    ``rotary_dim`` on stay.

    Args:
        tensor: ``[n_heads * head_dim, ...]``: a weight, a bias, or with ``n_heads`` 1 a per-head norm.
        n_heads: heads in ``tensor``.
        head_dim: rows of a head.
        rotary_dim: rows of a head that are rotated, even, >= 2.
        source: present order.
        target: order wanted.

    Returns:
        ``tensor`` itself if the orders are equal, else a new tensor of its shape and dtype.

    Raises:
        ValueError: the shape is not ``[n_heads * head_dim, ...]`` or ``rotary_dim`` does not fit.
    """
    if tensor.ndim == 0 or tensor.shape[0] != n_heads * head_dim:
        raise ValueError(
            f"tensor: wanted {n_heads * head_dim} rows ({n_heads} heads of {head_dim}), "
            f"got shape {list(tensor.shape)}"
        )
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim: wanted an even number in 2..{head_dim}, got {rotary_dim}")
    if source == target:
        return tensor
    order = torch.arange(head_dim, device=tensor.device)
    lanes = 2 if source == "half" else rotary_dim // 2
    order[:rotary_dim] = order[:rotary_dim].reshape(lanes, -1).T.flatten()
    return tensor.reshape(n_heads, head_dim, -1)[:, order].reshape(tensor.shape)
