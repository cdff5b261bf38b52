"""Decode attention over contiguous and paged KV."""

from __future__ import annotations

from typing import Literal

import torch

from astrai_triton.ops.check import (
    UNBOUNDED,
    check_bools,
    check_ints,
    check_new,
    check_options,
    check_rows,
    check_shape,
    take_out,
)
from cuda_ref.ops.call import Call
from cuda_ref.ops.check import (
    check_length,
    check_qkv,
    check_scratch,
    choose_variant,
    describe_options,
)

Variant = Literal["auto", "scalar", "mma"]


def attn_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    k_scale: float | None = None,
    v_scale: float | None = None,
    variant: Variant = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As ``astrai_triton.ops.attn_decode``: one row of q per request over contiguous K and V.

    Args:
        q: ``[B, 1, Hq, D]`` float16, bfloat16 or float32; D a multiple of 8 from 16 to 256. Any strides with
            a unit last one, here and for every tensor with a head_dim.
        k: ``[B, L, Hkv, D]``, dtype of q; Hq is a multiple of Hkv.
        v: ``[B, L, Hkv, Dv]``, dtype of q.
        mask: ``[B, L]`` bool, True = keep.
        softmax_scale, window_size, softcap, sinks: as there.
        out: ``[B, 1, Hq, Dv]`` of the dtype of q, written whole; None allocates it.
        return_lse: also return the log-sum-exp.
        k_scale, v_scale: None; there is no fp8 here.
        variant: "mma" multiplies on tensor cores: 16-bit dtypes, every row at a multiple of 16 bytes.
            "scalar" does not. "auto" is "mma" where it can do the call, else "scalar".

    Returns:
        ``[B, 1, Hq, Dv]``; with ``return_lse`` also ``[B, 1, Hq]`` float32, natural log, the sink included.

    Raises:
        ValueError: shapes, strides, devices or ranges do not fit, or the variant cannot do the call.
        TypeError: a dtype does not fit.
        RuntimeError: no build runs on this device.
    """
    check_qkv(q, k, v, k_scale=k_scale, v_scale=v_scale)
    check_shape("q", q, ("B", 1, "Hq", "D"))
    check_shape("k", k, (q.shape[0], "L", "Hkv", "D"))
    check_options(q, softmax_scale, window_size, softcap, sinks)
    batch, _, q_heads, head_dim = q.shape
    kv_len = k.shape[1]
    check_length("k", kv_len)
    if mask is not None:
        check_bools("mask", mask, (batch, kv_len), q.device)
    out = take_out(out, (batch, 1, q_heads, v.shape[-1]), q.dtype, q.device)
    call = Call("AttnParams", q.device)
    call.add("k", k, "k_stride_b", "k_stride_n", "k_stride_h")
    call.add("v", v, "v_stride_b", "v_stride_n", "v_stride_h")
    call.add("mask", mask, "mask_stride_b", "mask_stride_n")
    call.set(
        kv_len=kv_len,
        max_kv_len=kv_len,
        **describe_options(head_dim, softmax_scale, window_size, softcap, is_causal=True),
    )
    chosen = choose_variant(variant, call.extension.has_mma, q, k, v, out)
    lse = _run("attn_decode", call, q[:, 0], v, sinks, out[:, 0], return_lse, (None, None), chosen)
    return out if lse is None else (out, lse[:, None])


def attn_paged_decode(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    new_k: torch.Tensor | None = None,
    new_v: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
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
    """As ``astrai_triton.ops.attn_paged_decode``: one row of q per request over K and V in a pool.

    Args:
        q: ``[B, Hq, D]``; dtypes and head dims as in ``attn_decode``.
        k_buffer: ``[slots, Hkv, D]``.
        v_buffer: ``[slots, Hkv, Dv]``.
        req_to_token: ``[R, context]`` int32, position -> slot, any strides; masked as there.
        req_pool_indices: ``[B]`` int32, request -> row of ``req_to_token``.
        kv_indptr: ``[B + 1]`` int32, prefix sum of the key counts, the new token included.
        new_k: ``[B, Hkv, D]``, dtype of q, stored into its slot; given together with ``new_v``.
        new_v: ``[B, Hkv, Dv]``, dtype of q.
        mask: bool ``[kv_indptr[B]]``, the keys of request after request; True = keep.
        softmax_scale, window_size, softcap, sinks: as there.
        out: ``[B, Hq, Dv]`` of the dtype of q, written whole; None allocates it.
        return_lse: also return the log-sum-exp.
        k_scale, v_scale: None; there is no fp8 here.
        o_part: ``[B, Hq, S, Dv]`` float32 contiguous scratch; None allocates it when it is needed.
        ml_part: ``[B, Hq, S, 2]`` float32 contiguous scratch, given together with ``o_part``. These kernels
            cut splits of their own; the message of a short scratch says how many S must hold.
        max_kv_len: at least the longest key count; keys from it on are not attended to. None is the context.
        variant: as in ``attn_decode``.

    Returns:
        ``[B, Hq, Dv]``; with ``return_lse`` also ``[B, Hq]`` float32, natural log, the sink included.

    Raises:
        ValueError: shapes, strides, devices or ranges do not fit, or the variant cannot do the call.
        TypeError: a dtype does not fit.
        RuntimeError: no build runs on this device.
    """
    check_qkv(q, k_buffer, v_buffer, k_name="k_buffer", v_name="v_buffer", k_scale=k_scale, v_scale=v_scale)
    check_shape("q", q, ("B", "Hq", "D"))
    check_shape("k_buffer", k_buffer, ("slots", "Hkv", "D"))
    check_options(q, softmax_scale, window_size, softcap, sinks)
    batch, q_heads, head_dim = q.shape
    check_ints("req_to_token", req_to_token, ("R", "context"), q.device)
    for name, tensor, size in (
        ("req_pool_indices", req_pool_indices, batch),
        ("kv_indptr", kv_indptr, batch + 1),
    ):
        check_ints(name, tensor, (size,), q.device)
        check_rows(name, tensor, q.device)
    if mask is not None:
        check_bools("mask", mask, ("sum of kv_len",), q.device)
    check_new(q, k_buffer, v_buffer, new_k, new_v)
    context = req_to_token.shape[1]
    check_length("req_to_token", context)
    if max_kv_len is None:
        max_kv_len = context
    if not 0 <= max_kv_len <= context:
        raise ValueError(
            f"max_kv_len: wanted 0 to the width of req_to_token, {context}, got {max_kv_len}; widen the table"
        )
    out = take_out(out, (batch, q_heads, v_buffer.shape[-1]), q.dtype, q.device)
    call = Call("AttnParams", q.device)
    is_written = new_k is not None
    call.add("k", k_buffer, "k_stride_n", "k_stride_h", is_writable=is_written)
    call.add("v", v_buffer, "v_stride_n", "v_stride_h", is_writable=is_written)
    call.add("new_k", new_k, "new_k_stride_b", "new_k_stride_h")
    call.add("new_v", new_v, "new_v_stride_b", "new_v_stride_h")
    call.add("req_to_token", req_to_token, "table_stride_r", "table_stride_n")
    call.add("req_pool_indices", req_pool_indices)
    call.add("kv_indptr", kv_indptr)
    call.add("mask", mask, "mask_stride_n")
    call.set(
        num_slots=k_buffer.shape[0],
        num_reqs=req_to_token.shape[0],
        context=context,
        max_kv_len=max_kv_len,
        **describe_options(head_dim, softmax_scale, window_size, softcap, is_causal=True),
    )
    chosen = choose_variant(variant, call.extension.has_mma, q, k_buffer, v_buffer, new_k, new_v, out)
    lse = _run("attn_paged_decode", call, q, v_buffer, sinks, out, return_lse, (o_part, ml_part), chosen)
    return out if lse is None else (out, lse)


def _run(
    entry: str,
    call: Call,
    q: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    return_lse: bool,
    scratch: tuple[torch.Tensor | None, torch.Tensor | None],
    variant: str,
) -> torch.Tensor | None:
    """What both forms share: q ``[B, Hq, D]``, out ``[B, Hq, Dv]``, sinks, lse and scratch."""
    batch, q_heads, head_dim = q.shape
    kv_heads, value_dim = v.shape[-2:]
    call.add("q", q, "q_stride_b", "q_stride_h")
    call.add("out", out, "out_stride_b", "out_stride_h", is_writable=True)
    call.add("sinks", None if sinks is None else sinks.float().contiguous())
    call.set(batch=batch, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
    lse = torch.empty(batch, q_heads, dtype=torch.float32, device=q.device) if return_lse else None
    call.add("lse", lse, is_writable=True)
    splits = call.extension.count_decode_splits(call.params, call.dtype(q.dtype))
    if splits > 1:
        for name, tensor in zip(
            ("o_part", "ml_part"), _take_parts(scratch, splits, q, value_dim), strict=True
        ):
            call.add(name, tensor, is_writable=True)
    call.run(entry, q.dtype, getattr(call.extension.Variant, variant))
    return lse


def _take_parts(
    scratch: tuple[torch.Tensor | None, torch.Tensor | None], splits: int, q: torch.Tensor, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scratch of ``splits`` splits, contiguous: the beginning of the caller's, else new."""
    batch, q_heads, _ = q.shape
    taken = check_scratch(*scratch, (batch, q_heads, splits, value_dim), q.device)
    shapes = (batch, q_heads, splits, value_dim), (batch, q_heads, splits, 2)
    if taken is None:
        o_part, ml_part = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes)
    else:
        o_part, ml_part = (
            tensor.flatten()[: torch.Size(shape).numel()] for tensor, shape in zip(taken, shapes, strict=True)
        )
    return o_part, ml_part
