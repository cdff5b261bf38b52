"""Prefill attention over contiguous and paged KV."""

from __future__ import annotations

from typing import Literal

import torch

from astrai_triton.ops.check import (
    UNBOUNDED,
    check_bools,
    check_ints,
    check_options,
    check_rows,
    check_shape,
    take_out,
)
from cuda_ref.ops.call import Call
from cuda_ref.ops.check import (
    check_length,
    check_qkv,
    choose_variant,
    describe_options,
)

Variant = Literal["auto", "scalar", "mma"]


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
    variant: Variant = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As ``astrai_triton.ops.attn_prefill``: the rows of q over contiguous K and V.

    Args:
        q: ``[B, Lq, Hq, D]`` float16, bfloat16 or float32; D a multiple of 8 from 16 to 256. Any strides with
            a unit last one, here and for every tensor with a head_dim.
        k: ``[B, L, Hkv, D]``, dtype of q; Hq is a multiple of Hkv.
        v: ``[B, L, Hkv, Dv]``, dtype of q.
        mask: ``[B, L]`` or ``[B, Lq, L]`` bool, True = keep, any strides.
        is_causal, softmax_scale, window_size, softcap, sinks: as there.
        out: ``[B, Lq, Hq, Dv]`` of the dtype of q, written whole; None allocates it.
        return_lse: also return the log-sum-exp.
        k_scale, v_scale: None; there is no fp8 here.
        o_part, ml_part: not used, since these kernels do not split keys; taken so that a call of the Triton
            op is a call of this one.
        variant: "mma" multiplies on tensor cores: 16-bit dtypes, every row at a multiple of 16 bytes.
            "scalar" does not. "auto" is "mma" where it can do the call, else "scalar".

    Returns:
        ``[B, Lq, Hq, Dv]``; with ``return_lse`` also ``[B, Lq, Hq]`` float32, natural log, the sink included.

    Raises:
        ValueError: shapes, strides, devices or ranges do not fit, or the variant cannot do the call.
        TypeError: a dtype does not fit.
        RuntimeError: no build runs on this device.
    """
    check_qkv(q, k, v, k_scale=k_scale, v_scale=v_scale)
    check_shape("q", q, ("B", "Lq", "Hq", "D"))
    check_shape("k", k, (q.shape[0], "L", "Hkv", "D"))
    check_options(q, softmax_scale, window_size, softcap, sinks)
    batch, q_len, q_heads, head_dim = q.shape
    kv_len = k.shape[1]
    check_length("q", q_len)
    check_length("k", kv_len)
    if mask is not None:
        check_bools("mask", mask, (batch, kv_len) if mask.dim() == 2 else (batch, q_len, kv_len), q.device)
    out = take_out(out, (batch, q_len, q_heads, v.shape[-1]), q.dtype, q.device)
    call = Call("AttnParams", q.device)
    call.add("q", q, "q_stride_b", "q_stride_t", "q_stride_h")
    call.add("k", k, "k_stride_b", "k_stride_n", "k_stride_h")
    call.add("v", v, "v_stride_b", "v_stride_n", "v_stride_h")
    call.add("out", out, "out_stride_b", "out_stride_t", "out_stride_h", is_writable=True)
    if mask is not None:
        rows = ("mask_stride_t",) if mask.dim() == 3 else ()
        call.add("mask", mask, "mask_stride_b", *rows, "mask_stride_n")
    call.set(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        **describe_options(head_dim, softmax_scale, window_size, softcap, is_causal),
    )
    chosen = choose_variant(variant, call.extension.has_mma, q, k, v, out)
    lse = _run("attn_prefill", call, q, v, sinks, return_lse, chosen)
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
    variant: Variant = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As ``astrai_triton.ops.attn_paged_prefill``: a packed batch of rows over K and V in a pool.

    Args:
        q: ``[T, Hq, D]``; dtypes and head dims as in ``attn_prefill``.
        k_buffer: ``[slots, Hkv, D]``.
        v_buffer: ``[slots, Hkv, Dv]``.
        req_to_token: ``[R, context]`` int32, position -> slot, any strides; masked as there.
        req_pool_indices: ``[B]`` int32, request -> row of ``req_to_token``.
        kv_indptr: ``[B + 1]`` int32, prefix sum of the key counts.
        qo_indptr: ``[B + 1]`` int32, prefix sum of the row counts.
        q_tile_to_batch: ``[N]`` int32, tile of ``schedule.Q_TILE`` rows -> request, every tile once.
        q_tile_to_index: ``[N]`` int32, tile -> its index inside its request; see ``schedule.build_q_tiles``.
        mask: bool ``[sum of q_len * kv_len]``, contiguous, request after request, row after row; True = keep.
            Its prefix sum is computed on the device, which allocates.
        is_causal, softmax_scale, window_size, softcap, sinks: as there.
        out: ``[T, Hq, Dv]`` of the dtype of q, written whole; None allocates it.
        return_lse: also return the log-sum-exp.
        k_scale, v_scale: None; there is no fp8 here.
        o_part, ml_part, max_kv_len: not used, as in ``attn_prefill``.
        variant: as in ``attn_prefill``.

    Returns:
        ``[T, Hq, Dv]``; with ``return_lse`` also ``[T, Hq]`` float32, natural log, the sink included.

    Raises:
        ValueError: shapes, strides, devices or ranges do not fit, or the variant cannot do the call.
        TypeError: a dtype does not fit.
        RuntimeError: no build runs on this device.
    """
    check_qkv(q, k_buffer, v_buffer, k_name="k_buffer", v_name="v_buffer", k_scale=k_scale, v_scale=v_scale)
    check_shape("q", q, ("T", "Hq", "D"))
    check_shape("k_buffer", k_buffer, ("slots", "Hkv", "D"))
    check_options(q, softmax_scale, window_size, softcap, sinks)
    maps = {
        "req_pool_indices": req_pool_indices,
        "kv_indptr": kv_indptr,
        "qo_indptr": qo_indptr,
        "q_tile_to_batch": q_tile_to_batch,
        "q_tile_to_index": q_tile_to_index,
    }
    _check_maps(q.device, req_to_token, maps)
    tokens, q_heads, head_dim = q.shape
    check_length("q", tokens)
    check_length("req_to_token", req_to_token.shape[1])
    if max_kv_len is not None and max_kv_len < 0:
        raise ValueError(f"max_kv_len: wanted >= 0, got {max_kv_len}; None is the width of req_to_token")
    mask_indptr = None
    if mask is not None:
        check_bools("mask", mask, ("sum of q_len * kv_len",), q.device)
        check_rows("mask", mask, q.device)
        mask_indptr = _sum_scores(qo_indptr, kv_indptr)
    out = take_out(out, (tokens, q_heads, v_buffer.shape[-1]), q.dtype, q.device)
    call = Call("AttnParams", q.device)
    call.add("q", q, "q_stride_t", "q_stride_h")
    call.add("k", k_buffer, "k_stride_n", "k_stride_h")
    call.add("v", v_buffer, "v_stride_n", "v_stride_h")
    call.add("out", out, "out_stride_t", "out_stride_h", is_writable=True)
    call.add("req_to_token", req_to_token, "table_stride_r", "table_stride_n")
    for name, tensor in (*maps.items(), ("mask", mask), ("mask_indptr", mask_indptr)):
        call.add(name, tensor)
    call.set(
        batch=req_pool_indices.shape[0],
        num_slots=k_buffer.shape[0],
        num_reqs=req_to_token.shape[0],
        context=req_to_token.shape[1],
        num_q_tiles=q_tile_to_batch.shape[0],
        **describe_options(head_dim, softmax_scale, window_size, softcap, is_causal),
    )
    chosen = choose_variant(variant, call.extension.has_mma, q, k_buffer, v_buffer, out)
    lse = _run("attn_paged_prefill", call, q, v_buffer, sinks, return_lse, chosen)
    return out if lse is None else (out, lse)


def _run(
    entry: str,
    call: Call,
    q: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    return_lse: bool,
    variant: str,
) -> torch.Tensor | None:
    """What both forms share: head shapes, sinks and lse."""
    q_heads, head_dim = q.shape[-2:]
    kv_heads, value_dim = v.shape[-2:]
    call.set(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
    call.add("sinks", None if sinks is None else sinks.float().contiguous())
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if return_lse else None
    call.add("lse", lse, is_writable=True)
    call.run(entry, q.dtype, getattr(call.extension.Variant, variant))
    return lse


def _check_maps(device: torch.device, req_to_token: torch.Tensor, maps: dict[str, torch.Tensor]) -> None:
    """Dtypes, shapes and strides of the maps; that they fit each other stands on the device."""
    check_ints("req_to_token", req_to_token, ("R", "context"), device)
    batch, tiles = maps["req_pool_indices"].numel(), maps["q_tile_to_batch"].numel()
    sizes: tuple[int | str, ...] = (batch, batch + 1, batch + 1, "N", tiles)
    for (name, tensor), size in zip(maps.items(), sizes, strict=True):
        check_ints(name, tensor, (size,), device)
        check_rows(name, tensor, device)


def _sum_scores(qo_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> torch.Tensor:
    """Where the mask of each request starts: prefix sum of q_len * kv_len, int64 since it outgrows int32."""
    scores = qo_indptr.diff().long() * kv_indptr.diff()
    return torch.nn.functional.pad(scores.cumsum(0), (1, 0))
