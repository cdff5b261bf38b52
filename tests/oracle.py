"""Attention in float64, one row at a time, written from the contract and independent of every implementation.

Also the plainest rotary embedding. Slow on purpose: nothing is vectorised that could hide an index error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch


@attrs.frozen(kw_only=True)
class Options:
    """What a call may ask for beyond shapes and a mask."""

    is_causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0


def visible_keys(row: int, q_len: int, kv_len: int, options: Options) -> list[int]:
    """Keys that row ``row`` of ``q_len`` sees: bottom-right causality and the inclusive window."""
    position = kv_len - q_len + row
    left, right = options.window_size
    keys = []
    for key in range(kv_len):
        if options.is_causal and key > position:
            continue
        if left >= 0 and key < position - left:
            continue
        if right >= 0 and key > position + right:
            continue
        keys.append(key)
    return keys


def attend_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, sink: float | None
) -> tuple[torch.Tensor, float]:
    """One row q ``[D]`` over the keys it sees, k ``[n, D]``, v ``[n, Dv]``: out ``[Dv]`` float64 and its lse.

    Without a key the output is 0 and the lse is that of the sink alone, -inf without one.
    """
    q, k, v = q.double(), k.double(), v.double()
    scale = 1 / math.sqrt(q.shape[0]) if options.softmax_scale is None else options.softmax_scale
    scores = (k @ q) * scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    logits = scores if sink is None else torch.cat((scores, scores.new_tensor([sink])))
    if not logits.numel():
        return v.new_zeros(v.shape[1]), -math.inf
    lse = torch.logsumexp(logits, dim=0)
    return torch.exp(scores - lse) @ v, lse.item()


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    *,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q ``[B, Lq, Hq, D]``, k ``[B, L, Hkv, D]``, v ``[B, L, Hkv, Dv]``; mask ``[B, L]`` or ``[B, Lq, L]``.

    Returns:
        out ``[B, Lq, Hq, Dv]`` and lse ``[B, Lq, Hq]``, float64.
    """
    batch, q_len, q_heads, _ = q.shape
    kv_len, kv_heads, value_dim = v.shape[1:]
    out = torch.zeros(batch, q_len, q_heads, value_dim, dtype=torch.float64)
    lse = torch.zeros(batch, q_len, q_heads, dtype=torch.float64)
    for b in range(batch):
        for row in range(q_len):
            keys = visible_keys(row, q_len, kv_len, options)
            if attn_mask is not None:
                keep = attn_mask[b] if attn_mask.dim() == 2 else attn_mask[b, row]
                keys = [key for key in keys if keep[key]]
            for head in range(q_heads):
                kv_head = head // (q_heads // kv_heads)
                sink = None if sinks is None else float(sinks[head])
                out[b, row, head], lse[b, row, head] = attend_row(
                    q[b, row, head], k[b, keys, kv_head], v[b, keys, kv_head], options, sink
                )
    return out, lse


def attend_packed(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: Sequence[int],
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    options: Options,
    *,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q ``[T, Hq, D]`` over pools ``[size, Hkv, D]`` through ``req_to_token``; negative slots are masked.

    ``attn_mask`` is the ragged ``[sum of q_len * kv_len]``.

    Returns:
        out ``[T, Hq, Dv]`` and lse ``[T, Hq]``, float64.
    """
    tokens, q_heads, _ = q.shape
    kv_heads, value_dim = v_pool.shape[1:]
    out = torch.zeros(tokens, q_heads, value_dim, dtype=torch.float64)
    lse = torch.zeros(tokens, q_heads, dtype=torch.float64)
    token = score = 0
    for table_row, q_len, kv_len in zip(req_pool_indices, q_lens, kv_lens, strict=True):
        for row in range(q_len):
            keys = visible_keys(row, q_len, kv_len, options)
            if attn_mask is not None:
                keys = [key for key in keys if attn_mask[score + row * kv_len + key]]
            slots = [int(req_to_token[table_row, key]) for key in keys]
            slots = [slot for slot in slots if slot >= 0]
            for head in range(q_heads):
                kv_head = head // (q_heads // kv_heads)
                sink = None if sinks is None else float(sinks[head])
                out[token, head], lse[token, head] = attend_row(
                    q[token, head], k_pool[slots, kv_head], v_pool[slots, kv_head], options, sink
                )
            token += 1
        score += q_len * kv_len
    return out, lse


def write_rows(pool: torch.Tensor, rows: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
    """A copy of pool ``[size, Hkv, D]`` with rows ``[T, Hkv, D]`` in it; a negative slot drops its row."""
    pool = pool.clone()
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            pool[slot] = row
    return pool


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: str) -> torch.Tensor:
    """Rotary of one head x ``[D]`` by cos, sin ``[R/2]``, in float64."""
    out = x.double().clone()
    half = cos.shape[0]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if pairing == "adjacent" else (i, i + half)
        c, s, u, w = float(cos[i]), float(sin[i]), float(x[a]), float(x[b])
        out[a] = u * c - w * s
        out[b] = w * c + u * s
    return out
