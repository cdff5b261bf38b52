"""The attention entry point: checks the arguments once, picks a backend and runs it."""

from __future__ import annotations

import math
import weakref

import torch

from astrai_triton.backend.base import AttentionCall, Forward, derive_forward
from astrai_triton.backend.selection import select
from astrai_triton.kvcache import KVCache

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_UNBOUNDED = (-1, -1)

# A KVCache is checked when it is first seen, not again by every layer of its step.
_checked_caches: weakref.WeakSet[KVCache] = weakref.WeakSet()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: KVCache | None = None,
    layer_id: int = 0,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    fwd: Forward | None = None,
    *,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = _UNBOUNDED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    is_stored: bool = False,
) -> torch.Tensor:
    """Softmax attention, dense and differentiable or over the KV cache.

    Without ``kv_cache`` q ``[B, Lq, Hq, D]`` attends to k ``[B, L, Hkv, D]`` and v ``[B, L, Hkv, Dv]``. With
    it q ``[T, Hq, D]``, k ``[T, Hkv, D]`` and v ``[T, Hkv, Dv]`` are the packed rows of this step: k and v
    are written to the slots ``kv_cache.out_cache_loc`` of layer ``layer_id``, in place, then each request
    attends to its whole cache, without gradients. A row that sees no key gives 0. What no row sees (unused
    slots, masked keys) may hold anything, NaN included.

    Args:
        q: float16, bfloat16 or float32; any strides with a unit last dimension.
        k: dtype and device of q; Hq is a multiple of Hkv.
        v: dtype and device of q; Dv may differ from D.
        kv_cache: what ``PagePool.bind_tasks`` returned for this step.
        layer_id: layer of the cache, from 0.
        attn_mask: bool, True = keep. Dense ``[B, L]`` or ``[B, Lq, L]``; with a cache the ragged
            ``[sum of q_len * kv_len]``, request after request, rows of keys.
        is_causal: row i of Lq sees keys up to L - Lq + i, on top of ``attn_mask``. Implied in decode.
        fwd: "dense" without a cache; with one "decode" (one row per request) or "prefill". None derives it.
        softmax_scale: multiplies the scores; None is 1/sqrt(D).
        window_size: (left, right): position p sees keys p - left to p + right inclusive; -1 is unbounded.
        softcap: 0 is off; otherwise scores become softcap * tanh(scores / softcap).
        sinks: ``[Hq]`` floating; one logit per q head that joins the softmax denominator without a value.
        is_stored: the cache holds K and V of the rows already, as after ``rotary_append_``; k and v only
            give their shape.

    Returns:
        ``[B, Lq, Hq, Dv]`` or ``[T, Hq, Dv]``, dtype of q. In decode it may be ``kv_cache.decode_out``, which
        the next decode call over the same workspace overwrites.

    Raises:
        ValueError: shapes, ranges or devices do not fit together.
        TypeError: a dtype that is not supported or not the same everywhere.
        UnknownBackendError: ``ASTR_BACKEND`` names no backend.
        UnsupportedCallError: the backend chosen by context or environment cannot run it, with the reason.
    """
    _check_tensors(q, k, v)
    if kv_cache is None:
        fwd = _check_dense(q, k, v, attn_mask, fwd)
        if is_stored:
            raise ValueError("is_stored: wanted False without kv_cache, got True; pass kv_cache")
    else:
        fwd = _check_packed(q, k, v, kv_cache, layer_id, attn_mask, fwd)
    if window_size != _UNBOUNDED or softcap != 0.0 or softmax_scale is not None or sinks is not None:
        _check_options(q, softmax_scale, window_size, softcap, sinks)
    call = AttentionCall(
        q, k, v, kv_cache, layer_id, attn_mask, is_causal, fwd, softmax_scale, window_size, softcap, sinks,
        is_stored,
    )  # fmt: skip
    return select(call).forward(call)


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if q.dtype not in _DTYPES:
        raise TypeError(f"q: wanted float16, bfloat16 or float32, got {q.dtype}; cast it first")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"k, v: wanted the dtype of q, {q.dtype}, got {k.dtype} and {v.dtype}; cast them first"
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"k, v: wanted the device of q, {q.device}, got {k.device} and {v.device}")
    rank = q.dim()
    if rank < 3 or k.dim() != rank or v.dim() != rank:
        raise ValueError(
            "q, k, v: wanted [B, L, heads, head_dim] without kv_cache or [tokens, heads, head_dim] with it, "
            f"got shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v: wanted the shape of k {tuple(k.shape)} up to head_dim, got {tuple(v.shape)}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k: wanted the head_dim of q, {q.shape[-1]}, got {k.shape[-1]}")
    q_heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"q: wanted a multiple of {kv_heads} kv heads, got {q_heads} heads")
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        _check_strides(q, k, v)


def _check_strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
            raise ValueError(
                f"{name}: wanted a unit last stride, got strides {tensor.stride()}; call .contiguous() on it"
            )


def _check_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, fwd: Forward | None
) -> Forward:
    if fwd not in (None, "dense"):
        raise ValueError(f"fwd: wanted None or 'dense' without kv_cache, got {fwd!r}; pass kv_cache")
    if q.dim() != 4:
        raise ValueError(
            f"q: wanted [B, Lq, Hq, D] without kv_cache, got shape {tuple(q.shape)}; "
            "packed rows need kv_cache"
        )
    batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
    if k.shape[0] != batch:
        raise ValueError(f"k: wanted the batch of q, {batch}, got {k.shape[0]}")
    if attn_mask is not None:
        _check_mask(attn_mask, q, ((batch, kv_len), (batch, q_len, kv_len)))
    return "dense"


def _check_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    layer_id: int,
    attn_mask: torch.Tensor | None,
    fwd: Forward | None,
) -> Forward:
    if cache not in _checked_caches:
        _check_cache(cache)
        _checked_caches.add(cache)
    if q.dim() != 3:
        raise ValueError(f"q: wanted [tokens, Hq, D] with kv_cache, got shape {tuple(q.shape)}")
    rows = cache.out_cache_loc.shape[0]
    if q.shape[0] != rows or k.shape[0] != rows:
        raise ValueError(
            f"q, k, v: wanted the {rows} rows of kv_cache.q_lens, got {q.shape[0]} and {k.shape[0]}"
        )
    for name, tensor, buffer in (("k", k, cache.k_buffer), ("v", v, cache.v_buffer)):
        if tensor.shape[1:] != buffer.shape[2:]:
            raise ValueError(
                f"{name}: wanted [Hkv, D] of its buffer, {tuple(buffer.shape[2:])}, "
                f"got {tuple(tensor.shape[1:])}"
            )
        if tensor.dtype != buffer.dtype:
            raise TypeError(f"{name}: wanted the dtype of its buffer, {buffer.dtype}, got {tensor.dtype}")
    if q.device != cache.k_buffer.device:
        raise ValueError(f"q: wanted the device of the KV cache, {cache.k_buffer.device}, got {q.device}")
    n_layers = cache.k_buffer.shape[0]
    if not 0 <= layer_id < n_layers:
        raise ValueError(f"layer_id: wanted 0 to {n_layers - 1}, got {layer_id}")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError(
            "q, k, v: wanted tensors without gradients with kv_cache; "
            "use torch.inference_mode(), or leave kv_cache out"
        )
    if attn_mask is not None:
        num_scores = sum(q_len * kv_len for q_len, kv_len in zip(cache.q_lens, cache.kv_lens, strict=True))
        _check_mask(attn_mask, q, ((num_scores,),))
    return _packed_forward(cache, fwd)


def _packed_forward(cache: KVCache, fwd: Forward | None) -> Forward:
    if fwd is None:
        return derive_forward(cache)
    if fwd == "decode" and derive_forward(cache) != "decode":
        raise ValueError(f"fwd: 'decode' wants one row per request, got q_lens {cache.q_lens}; use 'prefill'")
    if fwd not in ("decode", "prefill"):
        raise ValueError(f"fwd: wanted None, 'decode' or 'prefill' with kv_cache, got {fwd!r}")
    return fwd


def _check_cache(cache: KVCache) -> None:
    batch, rows = len(cache.q_lens), sum(cache.q_lens)
    if cache.k_buffer.dim() != 4 or cache.k_buffer.shape[:3] != cache.v_buffer.shape[:3]:
        raise ValueError(
            "kv_cache: wanted k_buffer and v_buffer [n_layers, size, Hkv, head_dim], alike up to head_dim, "
            f"got {tuple(cache.k_buffer.shape)} and {tuple(cache.v_buffer.shape)}"
        )
    for name, size in (
        ("req_pool_indices", batch),
        ("seq_lens", batch),
        ("out_cache_loc", rows),
        ("kv_indptr", batch + 1),
        ("qo_indptr", batch + 1),
    ):
        shape = tuple(getattr(cache, name).shape)
        if shape != (size,):
            raise ValueError(
                f"kv_cache.{name}: wanted shape ({size},) to fit q_lens {cache.q_lens}, got {shape}"
            )
    if len(cache.kv_lens) != batch:
        raise ValueError(
            f"kv_cache.kv_lens: wanted one for each of the {batch} requests, got {len(cache.kv_lens)}"
        )
    if min(cache.q_lens, default=0) < 0 or min(cache.kv_lens, default=0) < 0:
        raise ValueError(f"kv_cache: wanted lengths >= 0, got q_lens {cache.q_lens}, kv_lens {cache.kv_lens}")
    if cache.req_to_token.dim() != 2:
        raise ValueError(
            f"kv_cache.req_to_token: wanted [num_reqs, max_ctx_len], got {tuple(cache.req_to_token.shape)}"
        )
    longest, width = max(cache.kv_lens, default=0), cache.req_to_token.shape[1]
    if not longest <= cache.max_len <= width:
        raise ValueError(
            f"kv_cache.max_len: wanted {longest} (the longest kv_len) to {width} (the width of "
            f"req_to_token), got {cache.max_len}"
        )


def _check_mask(mask: torch.Tensor, q: torch.Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attn_mask: wanted bool (True = keep), got {mask.dtype}; compare your mask with 0 first"
        )
    if tuple(mask.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"attn_mask: wanted shape {wanted}, got {tuple(mask.shape)}")
    if mask.device != q.device:
        raise ValueError(f"attn_mask: wanted the device of q, {q.device}, got {mask.device}")


def _check_options(
    q: torch.Tensor,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None,
) -> None:
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale: wanted a finite number or None, got {softmax_scale}")
    if len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(
            f"window_size: wanted (left, right), each >= 0 or -1 for unbounded, got {window_size}"
        )
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap: wanted a finite number >= 0 (0 is off), got {softcap}")
    if sinks is None:
        return
    if not sinks.is_floating_point():
        raise TypeError(f"sinks: wanted a floating dtype, got {sinks.dtype}")
    if tuple(sinks.shape) != (q.shape[-2],):
        raise ValueError(f"sinks: wanted shape ({q.shape[-2]},), one per q head, got {tuple(sinks.shape)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks: wanted the device of q, {q.device}, got {sinks.device}")
