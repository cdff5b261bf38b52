"""Right results of every operation in float64, from the contract alone: no kernel, no backend."""

from __future__ import annotations

import math

import torch

from astrai_bench.cross_cases import CrossCase


def find_visible(case: CrossCase, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """bool ``[q_len, kv_len]``: what causality and the window let each row see.

    Row i stands at position p = kv_len - q_len + i and sees keys from p - left to p + right.
    """
    positions = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    keys = torch.arange(kv_len, device=device)
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    left, right = case.window
    if left >= 0:
        visible &= keys >= positions - left
    if right >= 0:
        visible &= keys <= positions + right
    if case.is_causal:
        visible &= keys <= positions
    return visible


def attend(
    case: CrossCase,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request.

    Args:
        case: scale, softcap and heads.
        q: ``[Lq, Hq, D]``.
        k: ``[L, Hkv, D]``; what no row sees may be anything.
        v: ``[L, Hkv, Dv]``.
        visible: bool ``[Lq, L]``.
        sinks: ``[Hq]`` or None.

    Returns:
        ``[Lq, Hq, Dv]`` and the natural log-sum-exp ``[Lq, Hq]``, float64; 0 and -inf for a row without keys.
    """
    seen = visible.any(dim=0)[:, None, None]
    keys = torch.where(seen, k.double(), 0.0).repeat_interleave(case.group, dim=1)
    values = torch.where(seen, v.double(), 0.0).repeat_interleave(case.group, dim=1)
    scale = 1 / math.sqrt(case.head_dim) if case.softmax_scale is None else case.softmax_scale
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    logits = scores
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        logits = torch.cat((scores, column), dim=-1)
    lse = (
        torch.logsumexp(logits, dim=-1) if logits.shape[-1] else scores.new_full(scores.shape[:2], -math.inf)
    )
    # exp(-inf - -inf) would be NaN: a row that sees nothing has no weights.
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(torch.float64).min)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, values), lse.T


def rotate(x: torch.Tensor, freqs_cis: torch.Tensor, pairing: str) -> torch.Tensor:
    """x ``[T, H, D]`` turned by ``[T, R/2, 2]``, float64; elements from R on stay as they are."""
    rotary_dim = 2 * freqs_cis.shape[-2]
    cos, sin = freqs_cis.double()[:, None].unbind(-1)
    out = x.double().clone()
    if pairing == "adjacent":
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    else:
        first, second = slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)
    a, b = x[..., first].double(), x[..., second].double()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def merge(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states ``[T, H, D]`` and ``[T, H]`` joined, float64; a state that saw nothing may hold anything."""
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    out = torch.zeros_like(o_a, dtype=torch.float64)
    for values, state_lse in ((o_a, lse_a), (o_b, lse_b)):
        has_keys = state_lse > -math.inf
        weights = torch.where(has_keys, torch.exp(state_lse.double() - lse), 0.0)
        out += weights[..., None] * torch.where(has_keys[..., None], values.double(), 0.0)
    return out, lse
