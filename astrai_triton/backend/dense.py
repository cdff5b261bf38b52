"""Attention over K and V that lie densely, in torch: which keys each row sees, and two ways to compute it.

Plain calls go to torch's scaled_dot_product_attention. What it does not offer (softcap, sinks, the
log-sum-exp) is computed step by step in float32. Both are differentiable.
"""

from __future__ import annotations

from typing import Literal, overload

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention

SCORE_BUDGET = 1 << 24
"""Scores that the float32 path holds at once, 64 MiB; longer calls go by blocks of rows."""

KEY_BLOCK = 256
"""Keys that the float32 path sums at once: BLAS splits longer sums, and bits would depend on padding."""


@attrs.frozen(eq=False)
class Visibility:
    """Which keys each row sees. Without fields: all of them."""

    keep: torch.Tensor | None = None
    """bool ``[B or 1, Lq or 1, L]``, True = keep."""
    bias: torch.Tensor | None = None
    """``[B or 1, 1, Lq or 1, L]``, ``keep`` as 0 and -inf in the dtype of q, made once for all layers."""
    empty: torch.Tensor | None = None
    """bool ``[B or 1, Lq or 1, 1, 1]``, True where a row sees nothing; None: every row sees a key."""
    causal: bool = False
    """As many rows as keys, and each sees those up to its own; ``keep`` is None then."""

    @classmethod
    def of(cls, keep: torch.Tensor | None, dtype: torch.dtype, *, every_row_sees: bool = False) -> Visibility:
        """From a mask.

        Args:
            keep: bool ``[B or 1, Lq or 1, L]`` or None for everything.
            dtype: of q.
            every_row_sees: it is known that no row is empty.
        """
        if keep is None:
            return cls()
        bias = torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, -torch.inf)
        return cls(keep, bias[:, None], None if every_row_sees else ~keep.any(dim=-1)[:, :, None, None])


def geometry_keep(
    q_len: int, kv_len: int, is_causal: bool, window_size: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor | None, bool]:
    """What causality and window leave visible; row i of q_len stands at position kv_len - q_len + i.

    Returns:
        bool ``[q_len, kv_len]`` and False; or None with True when it is the plain causal square, with False
        when every row sees every key.
    """
    left, right = window_size
    if is_causal:
        right = 0
    bounded_left = 0 <= left < kv_len - 1
    bounded_right = 0 <= right < q_len - 1
    if not (bounded_left or bounded_right):
        return None, False
    if right == 0 and not bounded_left and q_len == kv_len:
        return None, True
    positions = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    keys = torch.arange(kv_len, device=device)
    keep = keys <= positions + right if bounded_right else keys >= positions - left
    if bounded_left and bounded_right:
        keep &= keys >= positions - left
    return keep, False


def first_visible(q_len: int, kv_len: int, window_size: tuple[int, int]) -> int:
    """The first key that any of the last ``q_len`` positions sees through the window."""
    left = window_size[0]
    return max(kv_len - q_len - left, 0) if left >= 0 else 0


@overload
def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q ``[B, Lq, Hq, D]`` over k ``[B, L, Hkv, D]`` and v ``[B, L, Hkv, Dv]``.

    Arguments are those of ``attention()`` and not checked again.

    Returns:
        out ``[B, Lq, Hq, Dv]``; with ``return_lse`` also the natural-log float32 ``[B, Lq, Hq]`` log-sum-exp
        of the scaled, capped and masked scores, sink included. A row that sees nothing gives 0 and -inf (or
        its sink).
    """
    q_len, first = q.shape[1], first_visible(q.shape[1], k.shape[1], window_size)
    if first:
        k, v = k[:, first:], v[:, first:]
    kv_len = k.shape[1]
    keep, square = geometry_keep(q_len, kv_len, is_causal, window_size, q.device)
    if attn_mask is None and square:
        visible = Visibility(causal=True)
    elif attn_mask is None:
        batched = None if keep is None else keep[None]
        visible = Visibility.of(batched, q.dtype, every_row_sees=q_len <= kv_len)
    else:
        mask = attn_mask[..., first:]
        mask = mask[:, None] if mask.dim() == 2 else mask
        if square:
            keep = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril_()
        both = mask if keep is None else mask & keep
        # A key hidden from every row may hold NaN, and 0 * NaN would reach the output.
        hidden = ~both.any(dim=1)[:, :, None, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        visible = Visibility.of(both, q.dtype)
    if return_lse:
        return attend_stepwise(q, k, v, visible, softmax_scale, softcap, sinks)
    return attend(q, k, v, visible, softmax_scale, softcap, sinks)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visibility,
    softmax_scale: float | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of q ``[B, Lq, Hq, D]`` over k ``[B, L, Hkv, D]`` and v ``[B, L, Hkv, Dv]``.

    Keys that no row of a request sees must be finite, except in a request where no row sees anything.

    Returns:
        ``[B, Lq, Hq, Dv]``, dtype of q.
    """
    if q.numel() == 0 or k.shape[1] == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    if softcap or sinks is not None:
        out, _ = attend_stepwise(q, k, v, visible, softmax_scale, softcap, sinks)
    else:
        out = _attend_fused(q, k, v, visible, softmax_scale)
    if visible.empty is not None:
        out = out.masked_fill(visible.empty, 0)
    return out


def _attend_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visibility, scale: float | None
) -> torch.Tensor:
    """By scaled_dot_product_attention; query heads share their KV head uncopied wherever that can be."""
    batch, q_len, q_heads, head_dim = q.shape
    kv_heads, bias, causal = k.shape[2], visible.bias, visible.causal
    group = q_heads // kv_heads
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    if group == 1:
        out = scaled_dot_product_attention(q.transpose(1, 2), keys, values, bias, 0.0, causal, scale=scale)
        return out.transpose(1, 2)
    if q_len == 1:
        # The query heads of a group are the rows of one head.
        rows = q.reshape(batch, kv_heads, group, head_dim)
        out = scaled_dot_product_attention(rows, keys, values, bias, scale=scale)
        return out.reshape(batch, 1, q_heads, v.shape[-1])
    if batch == 1:
        # KV heads become the batch and a group's query heads the heads, over K and V with stride 0.
        grouped = q.view(q_len, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        keys, values = (t[0, :, None].expand(-1, group, -1, -1) for t in (keys, values))
        out = scaled_dot_product_attention(grouped, keys, values, bias, 0.0, causal, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(1, q_len, q_heads, v.shape[-1])
    if not causal and (bias is None or bias.shape[2] == 1):
        rows = q.reshape(batch, q_len, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = scaled_dot_product_attention(rows, keys, values, bias, scale=scale)
        out = out.reshape(batch, kv_heads, group, q_len, v.shape[-1])
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3)
    if bias is not None:
        # With a mask and shared heads torch has no fused kernel on a GPU and would hold all scores at once.
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    out = scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, bias, 0.0, causal, scale=scale, enable_gqa=bias is None
    )
    return out.transpose(1, 2)


def attend_stepwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visibility,
    softmax_scale: float | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``attend``, in float32 without a fused kernel, with the log-sum-exp.

    Returns:
        out ``[B, Lq, Hq, Dv]`` in the dtype of q, lse ``[B, Lq, Hq]`` float32.
    """
    batch, q_len, q_heads, head_dim = q.shape
    kv_heads, kv_len = k.shape[2], k.shape[1]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    scaled = (q.float() * scale).reshape(batch, q_len, kv_heads, q_heads // kv_heads, head_dim)
    rows = scaled.permute(0, 2, 3, 1, 4)
    keys, values = _head_major(k).transpose(-1, -2), _head_major(v)
    keep = visible.keep
    if visible.causal:
        keep = torch.ones(1, q_len, kv_len, dtype=torch.bool, device=q.device).tril_()
    logits = None if sinks is None else sinks.float().view(kv_heads, -1, 1)
    block = max(SCORE_BUDGET // max(batch * q_heads * kv_len, 1), 1)
    outs, lses = [], []
    for start in range(0, max(q_len, 1), block):
        some = keep if keep is None or keep.shape[1] == 1 else keep[:, start : start + block]
        out, lse = _softmax_block(rows[:, :, :, start : start + block], keys, values, some, softcap, logits)
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs, dim=3), torch.cat(lses, dim=3)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype), lse.permute(0, 3, 1, 2).flatten(2, 3)


def _head_major(x: torch.Tensor) -> torch.Tensor:
    """``[B, L, Hkv, D]`` -> contiguous float32 ``[B, Hkv, L, D]``: BLAS is slow over strided heads."""
    heads = x.transpose(1, 2)
    if heads.dtype == torch.float32:
        return heads.contiguous()
    return heads.to(torch.float32, memory_format=torch.contiguous_format)


def _softmax_block(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    keep: torch.Tensor | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of rows ``[B, Hkv, G, R, D]`` over keys ``[B, Hkv, D, L]``, values ``[B, Hkv, L, Dv]``."""
    weighed = rows.shape[:-1]
    scores = (rows.flatten(2, 3) @ keys).reshape(*weighed, keys.shape[-1])
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None, None], -torch.inf)
    if scores.shape[-1]:
        top = scores.detach().amax(dim=-1)
    else:
        top = scores.new_full(scores.shape[:-1], -torch.inf)
    if sinks is not None:
        top = torch.maximum(top, sinks.detach())
    # A row without anything to weigh has no maximum; any finite number serves, since all its weights are 0.
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(scores - top[..., None]).flatten(2, 3)
    total = torch.zeros_like(top) if sinks is None else torch.exp(sinks - top)
    out = weights.new_zeros(*weights.shape[:-1], values.shape[-1])
    for start in range(0, keys.shape[-1], KEY_BLOCK):
        part = weights[..., start : start + KEY_BLOCK]
        total = total + part.sum(dim=-1).view(weighed)
        out = out + part @ values[..., start : start + KEY_BLOCK, :]
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    out = out.view(*weighed, values.shape[-1]) / total[..., None]
    return out, (top + total.log()).masked_fill(nothing, -torch.inf)
