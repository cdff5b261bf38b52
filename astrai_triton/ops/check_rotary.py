"""Checks of rotary ops before a launch."""

from __future__ import annotations

import torch

from astrai_triton.ops.check import check_device, check_float, check_rows

MAX_HEAD_DIM = 1024
"""Widest head: one row of a tile must fit into the registers of a program."""


def check_heads(name: str, x: torch.Tensor) -> None:
    """Heads of packed or batched tokens, without gradient."""
    check_float(name, x)
    if x.dim() not in (3, 4):
        raise ValueError(
            f"{name}: wanted [T, H, D] or [B, L, H, D], got {list(x.shape)}; flatten or unsqueeze it"
        )
    if x.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(
            f"{name}: wanted a head_dim of at most {MAX_HEAD_DIM}, got {x.shape[-1]}; slice the rotated part"
        )
    check_rows(name, x, x.device)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: wanted a tensor without gradient, got one that requires it; use torch.no_grad(), or "
            "apply_rotary_emb, which is differentiable"
        )


def check_freqs(freqs_cis: torch.Tensor, x: torch.Tensor, name: str, pairing: str) -> torch.Tensor:
    """The table with the leading dimensions of x, as a view."""
    if pairing not in ("adjacent", "half"):
        raise ValueError(f"pairing: wanted 'adjacent' or 'half', got {pairing!r}; spell it so")
    check_float("freqs_cis", freqs_cis, (torch.float32,))
    check_device("freqs_cis", freqs_cis, x.device)
    shape, leading = freqs_cis.shape, x.shape[:-2]
    if len(shape) < 2 or shape[-1] != 2 or not 2 <= 2 * shape[-2] <= x.shape[-1]:
        raise ValueError(
            f"freqs_cis: wanted [..., rotary_dim / 2, 2] of (cos, sin), rotary_dim from 2 to the head_dim of "
            f"{name}, {x.shape[-1]}, got {list(shape)}; look the table up by position"
        )
    if freqs_cis.stride(-1) != 1 or (shape[-2] > 1 and freqs_cis.stride(-2) != 2):
        raise ValueError(
            f"freqs_cis: wanted contiguous (cos, sin) pairs, got strides {freqs_cis.stride()}; "
            "call .contiguous() on it"
        )
    if shape[:-2] == leading:
        return freqs_cis
    if len(shape) - 2 > len(leading) or any(
        have not in (1, want) for have, want in zip(reversed(shape[:-2]), reversed(leading), strict=False)
    ):
        raise ValueError(
            f"freqs_cis: wanted leading dimensions {list(leading)} of {name} without heads, or broadcastable "
            f"to them, got {list(shape[:-2])}; look the table up by the positions of {name}"
        )
    return freqs_cis.expand(*leading, *shape[-2:])
