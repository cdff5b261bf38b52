"""Prefill attention over contiguous and paged KV."""

from __future__ import annotations

import torch

from astrai_triton.ops.check import (
    UNBOUNDED,
    check_bools,
    check_ints,
    check_options,
    check_qkv,
    check_rows,
    check_shape,
    take_out,
)
from astrai_triton.ops.launch import MAX_GRID_SIDE
from astrai_triton.ops.launch_prefill import WINDOW_MAX
from astrai_triton.ops.options import Options
from astrai_triton.ops.prefill_call import Places, describe_call, find_windows, launch_prefill
from astrai_triton.ops.prefill_plan import plan_dense, plan_packed


def attn_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    k_scale: float | None = None,
    v_scale: float | None = None,
    o_part: torch.Tensor | None = None,
    ml_part: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the rows of q over contiguous K and V.

    Row i stands at position p = L - Lq + i, also when Lq > L. A row that sees no key gives 0 and an lse of
    -inf. What no row sees may hold anything, NaN included.

    Args:
        q: ``[B, Lq, Hq, D]`` float16, bfloat16 or float32; D a multiple of 8 from 16 to 256. Any strides with
            a unit last one, here and for every tensor with a head_dim.
        k: ``[B, L, Hkv, D]``, dtype of q, or fp8 (e4m3 from sm_89, e5m2) with a 16-bit q; Hq is a multiple of
            Hkv.
        v: ``[B, L, Hkv, Dv]``, dtype of k.
        mask: ``[B, L]`` or ``[B, Lq, L]`` bool with a unit last stride, True = keep. It acts together with
            ``is_causal`` and the window.
        is_causal: the row at position p sees keys up to p.
        softmax_scale: multiplies the scores; None is 1/sqrt(D).
        window_size: (left, right): the row at p sees keys p - left to p + right; -1 is unbounded.
        softcap: 0 is off; otherwise scores become softcap * tanh(scores / softcap).
        sinks: ``[Hq]`` floating; one logit per q head that joins the softmax denominator without a value.
        out: ``[B, Lq, Hq, Dv]`` of the dtype of q, written whole; None allocates it.
        return_lse: also return the log-sum-exp.
        k_scale: what fp8 K is to be multiplied by, > 0; None is 1.
        v_scale: what fp8 V is to be multiplied by, > 0; None is 1.
        o_part: ``[P, Hq, Dv]`` float32 contiguous scratch for rows over many keys, which are split; the
            message of a short one says how many rows P it takes. None allocates it.
        ml_part: ``[P, Hq, 2]`` float32 contiguous scratch, given together with ``o_part``.

    Returns:
        ``[B, Lq, Hq, Dv]``; with ``return_lse`` also ``[B, Lq, Hq]`` float32, natural log, the sink included.

    Raises:
        ValueError: shapes, strides, devices or ranges do not fit.
        TypeError: a dtype does not fit.
        RuntimeError: the kernels cannot run on this device.
    """
    arch = check_qkv(q, k, v, k_scale=k_scale, v_scale=v_scale)
    check_shape("q", q, ("B", "Lq", "Hq", "D"))
    check_shape("k", k, (q.shape[0], "L", "Hkv", "D"))
    check_options(q, softmax_scale, window_size, softcap, sinks)
    batch, q_len, q_heads, _ = q.shape
    kv_len = k.shape[1]
    _check_lengths(q_len, kv_len, q_heads)
    if mask is not None:
        check_bools("mask", mask, (batch, kv_len) if mask.dim() == 2 else (batch, q_len, kv_len), q.device)
        check_rows("mask", mask, q.device)
    out = take_out(out, (batch, q_len, q_heads, v.shape[-1]), q.dtype, q.device)
    options = Options(
        mask=mask,
        is_causal=is_causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
    )
    shape, flags = describe_call(q, k, v, options, out, is_packed=False)
    window_left, _ = find_windows(options)
    plan = plan_dense(arch, shape, flags, batch=batch, q_len=q_len, kv_len=kv_len, window_left=window_left)
    places = Places(q_len=q_len, kv_len=kv_len)
    lse = launch_prefill(q, k, v, places, options, out, (o_part, ml_part), plan)
    return out if lse is None else (out, lse)


def attn_paged_prefill(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    qo_indptr: torch.Tensor,
    q_tile_to_batch: torch.Tensor,
    q_tile_to_index: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    k_scale: float | None = None,
    v_scale: float | None = None,
    o_part: torch.Tensor | None = None,
    ml_part: torch.Tensor | None = None,
    max_kv_len: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a packed batch of rows over K and V in a pool, read through a table of slots.

    Request b owns rows ``qo_indptr[b]`` to ``qo_indptr[b + 1] - 1`` of q, the last of its
    ``kv_indptr[b + 1] - kv_indptr[b]`` positions; K and V of all of them are in the pool. Key p lies in slot
    ``req_to_token[req_pool_indices[b], p]``. A slot that is negative or not in the pool, a position beyond
    the table and a row that does not exist are masked and never read.

    Args:
        q: ``[T, Hq, D]``; dtypes and head dims as in ``attn_prefill``.
        k_buffer: ``[slots, Hkv, D]``.
        v_buffer: ``[slots, Hkv, Dv]``.
        req_to_token: ``[R, context]`` int32, position -> slot, any strides.
        req_pool_indices: ``[B]`` int32, request -> row of ``req_to_token``.
        kv_indptr: ``[B + 1]`` int32, prefix sum of the key counts.
        qo_indptr: ``[B + 1]`` int32, prefix sum of the row counts.
        q_tile_to_batch: ``[N]`` int32, tile of ``schedule.Q_TILE`` rows -> request, every tile once.
        q_tile_to_index: ``[N]`` int32, tile -> its index inside its request; see ``schedule.build_q_tiles``.
        mask: bool ``[sum of q_len * kv_len]``, contiguous, request after request, row after row; True = keep.
            Its prefix sum is computed on the device, which allocates.
        is_causal, softmax_scale, window_size, softcap, sinks, k_scale, v_scale: as in ``attn_prefill``.
        out: ``[T, Hq, Dv]`` of the dtype of q, written whole; None allocates it.
        return_lse: also return the log-sum-exp.
        o_part, ml_part: scratch as in ``attn_prefill``.
        max_kv_len: at least the longest key count; it saves programs and scratch of splits that no request
            can have. None is the context, the choice for a CUDA graph replayed with growing lengths.

    Returns:
        ``[T, Hq, Dv]``; with ``return_lse`` also ``[T, Hq]`` float32, natural log, the sink included.

    Raises:
        ValueError: shapes, strides, devices or ranges do not fit.
        TypeError: a dtype does not fit.
        RuntimeError: the kernels cannot run on this device.
    """
    arch = check_qkv(
        q, k_buffer, v_buffer, k_name="k_buffer", v_name="v_buffer", k_scale=k_scale, v_scale=v_scale
    )
    check_shape("q", q, ("T", "Hq", "D"))
    check_shape("k_buffer", k_buffer, ("slots", "Hkv", "D"))
    check_options(q, softmax_scale, window_size, softcap, sinks)
    maps = (req_to_token, req_pool_indices, kv_indptr, qo_indptr, q_tile_to_batch, q_tile_to_index)
    _check_maps(q.device, *maps)
    tokens, q_heads, _ = q.shape
    batch = req_pool_indices.shape[0]
    context = req_to_token.shape[1]
    _check_lengths(tokens, context, q_heads)
    if max_kv_len is None:
        max_kv_len = context
    if max_kv_len < 0:
        raise ValueError(f"max_kv_len: wanted >= 0, got {max_kv_len}; None is the width of req_to_token")
    mask_indptr = None
    if mask is not None:
        check_bools("mask", mask, ("sum of q_len * kv_len",), q.device)
        check_rows("mask", mask, q.device)
        mask_indptr = _sum_scores(qo_indptr, kv_indptr)
    out = take_out(out, (tokens, q_heads, v_buffer.shape[-1]), q.dtype, q.device)
    options = Options(
        mask=mask,
        mask_indptr=mask_indptr,
        is_causal=is_causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
    )
    # Packed rows are a dense batch of one; so are the slots of a pool.
    rows = (q[None], k_buffer[None], v_buffer[None])
    shape, flags = describe_call(*rows, options, out[None], is_packed=True)
    plan = plan_packed(
        arch,
        shape,
        flags,
        batch=batch,
        num_tokens=tokens,
        num_q_tiles=q_tile_to_batch.shape[0],
        max_kv_len=max_kv_len,
    )
    places = Places(
        req_to_token=req_to_token,
        req_pool_indices=req_pool_indices,
        kv_indptr=kv_indptr,
        qo_indptr=qo_indptr,
        q_tile_to_batch=q_tile_to_batch,
        q_tile_to_index=q_tile_to_index,
    )
    lse = launch_prefill(*rows, places, options, out[None], (o_part, ml_part), plan)
    return out if lse is None else (out, lse[0])


def _check_lengths(q_len: int, kv_len: int, q_heads: int) -> None:
    for name, length in (("q", q_len), ("k", kv_len)):
        if length >= WINDOW_MAX:
            raise ValueError(f"{name}: wanted fewer than {WINDOW_MAX} positions, got {length}; split them")
    if q_heads > MAX_GRID_SIDE:
        raise ValueError(f"q: wanted at most {MAX_GRID_SIDE} heads, got {q_heads}; split them")


def _check_maps(
    device: torch.device,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    qo_indptr: torch.Tensor,
    q_tile_to_batch: torch.Tensor,
    q_tile_to_index: torch.Tensor,
) -> None:
    """Dtypes, shapes and strides of the maps; that they fit each other stands on the device."""
    check_ints("req_to_token", req_to_token, ("R", "context"), device)
    batch = req_pool_indices.numel()
    for name, tensor, size in (
        ("req_pool_indices", req_pool_indices, batch),
        ("kv_indptr", kv_indptr, batch + 1),
        ("qo_indptr", qo_indptr, batch + 1),
        ("q_tile_to_batch", q_tile_to_batch, "N"),
        ("q_tile_to_index", q_tile_to_index, q_tile_to_batch.numel()),
    ):
        check_ints(name, tensor, (size,), device)
        check_rows(name, tensor, device)


def _sum_scores(qo_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> torch.Tensor:
    """Where the mask of each request starts: prefix sum of q_len * kv_len, int64 since it outgrows int32."""
    scores = qo_indptr.diff().long() * kv_indptr.diff()
    return torch.nn.functional.pad(scores.cumsum(0), (1, 0))
