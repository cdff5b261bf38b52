"""Decode attention over contiguous and paged KV, and the joining of softmax states."""

from __future__ import annotations

import torch

from astrai_triton.kernels.merge import merge_states_kernel
from astrai_triton.ops.check import (
    UNBOUNDED,
    check_bools,
    check_device,
    check_float,
    check_ints,
    check_new,
    check_options,
    check_qkv,
    check_rows,
    check_shape,
    take_out,
)
from astrai_triton.ops.launch import arch_of, launch_options, on_device, row_alignment
from astrai_triton.ops.launch_decode import states_config, states_constexprs
from astrai_triton.ops.options import INT32_MAX, Options
from astrai_triton.ops.split import Keys, run_splits


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one row of q per request over contiguous K and V.

    q stands at the last position. A row that sees no key gives 0 and an lse of -inf. What is not seen may
    hold anything, NaN included.

    Args:
        q: ``[B, 1, Hq, D]`` float16, bfloat16 or float32; D a multiple of 8 from 16 to 256. Any strides with
            a unit last one, here and for every tensor with a head_dim.
        k: ``[B, L, Hkv, D]``, dtype of q, or fp8 (e4m3 from sm_89, e5m2) with a 16-bit q; Hq is a multiple
            of Hkv.
        v: ``[B, L, Hkv, Dv]``, dtype of k.
        mask: ``[B, L]`` bool, True = keep.
        softmax_scale: multiplies the scores; None is 1/sqrt(D).
        window_size: (left, right): the row sees keys L - 1 - left to L - 1; -1 is unbounded.
        softcap: 0 is off; otherwise scores become softcap * tanh(scores / softcap).
        sinks: ``[Hq]`` floating; one logit per q head that joins the softmax denominator without a value.
        out: ``[B, 1, Hq, Dv]`` of the dtype of q, written whole; None allocates it.
        return_lse: also return the log-sum-exp.
        k_scale: what fp8 K is to be multiplied by, > 0; None is 1.
        v_scale: what fp8 V is to be multiplied by, > 0; None is 1.

    Returns:
        ``[B, 1, Hq, Dv]``; with ``return_lse`` also ``[B, 1, Hq]`` float32, natural log, the sink included.

    Raises:
        ValueError: shapes, strides, devices or ranges do not fit.
        TypeError: a dtype does not fit.
        RuntimeError: the kernels cannot run on this device.
    """
    arch = check_qkv(q, k, v, k_scale=k_scale, v_scale=v_scale)
    check_shape("q", q, ("B", 1, "Hq", "D"))
    check_shape("k", k, (q.shape[0], "L", "Hkv", "D"))
    if k.shape[1] > INT32_MAX:
        raise ValueError(f"k: wanted at most {INT32_MAX} positions, got {k.shape[1]}; attend to fewer keys")
    check_options(q, softmax_scale, window_size, softcap, sinks)
    if mask is not None:
        check_bools("mask", mask, k.shape[:2], q.device)
    batch, _, q_heads, _ = q.shape
    out = take_out(out, (batch, 1, q_heads, v.shape[-1]), q.dtype, q.device)
    options = Options(
        mask=mask,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
    )
    keys = Keys(k=k, v=v, max_kv_len=k.shape[1], dense_len=k.shape[1])
    lse = run_splits(q[:, 0], keys, options, out[:, 0], None, None, arch)
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one row of q per request over K and V in a pool, read through a table of slots.

    Request b has ``kv_indptr[b + 1] - kv_indptr[b]`` keys; key p lies in slot
    ``req_to_token[req_pool_indices[b], p]``. A slot that is negative or not in the pool, a position beyond
    the table and a row that does not exist are masked and never read. With ``new_k`` and ``new_v`` the last
    key is not in the pool yet: it is stored into its slot, in place, and attended to without being read
    back; a masked slot masks it too.

    Args:
        q: ``[B, Hq, D]``; dtypes and head dims as in ``attn_decode``.
        k_buffer: ``[slots, Hkv, D]``.
        v_buffer: ``[slots, Hkv, Dv]``.
        req_to_token: ``[R, context]`` int32, position -> slot, any strides.
        req_pool_indices: ``[B]`` int32, request -> row of ``req_to_token``.
        kv_indptr: ``[B + 1]`` int32, prefix sum of the key counts, the new token included.
        new_k: ``[B, Hkv, D]``, dtype of q; given together with ``new_v``.
        new_v: ``[B, Hkv, Dv]``, dtype of q.
        mask: bool ``[kv_indptr[B]]``, the keys of request after request; True = keep.
        softmax_scale, window_size, softcap, sinks, k_scale, v_scale: as in ``attn_decode``.
        out: ``[B, Hq, Dv]`` of the dtype of q, written whole; None allocates it.
        return_lse: also return the log-sum-exp.
        o_part: ``[B, Hq, S, Dv]`` float32 contiguous scratch; None allocates it when it is needed.
        ml_part: ``[B, Hq, S, 2]`` float32 contiguous scratch, given together with ``o_part``. S is at least
            ``schedule.num_decode_splits(max_kv_len, chunk)`` with the ``schedule.decode_chunk`` of the shape.
        max_kv_len: at least the longest key count; keys from it on are not attended to. None is the context,
            the choice for a CUDA graph that is replayed with growing lengths.

    Returns:
        ``[B, Hq, Dv]``; with ``return_lse`` also ``[B, Hq]`` float32, natural log, the sink included.

    Raises:
        ValueError: shapes, strides, devices or ranges do not fit.
        TypeError: a dtype does not fit.
        RuntimeError: the kernels cannot run on this device.
    """
    arch = check_qkv(
        q, k_buffer, v_buffer, k_name="k_buffer", v_name="v_buffer", k_scale=k_scale, v_scale=v_scale
    )
    check_shape("q", q, ("B", "Hq", "D"))
    check_shape("k_buffer", k_buffer, ("slots", "Hkv", "D"))
    check_options(q, softmax_scale, window_size, softcap, sinks)
    batch, q_heads, _ = q.shape
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
    if max_kv_len is None:
        max_kv_len = context
    if not 0 <= max_kv_len <= context:
        raise ValueError(
            f"max_kv_len: wanted 0 to the width of req_to_token, {context}, got {max_kv_len}; widen the table"
        )
    out = take_out(out, (batch, q_heads, v_buffer.shape[-1]), q.dtype, q.device)
    options = Options(
        mask=mask,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
    )
    keys = Keys(
        k=k_buffer,
        v=v_buffer,
        max_kv_len=max_kv_len,
        req_to_token=req_to_token,
        req_pool_indices=req_pool_indices,
        kv_indptr=kv_indptr,
        new_k=new_k,
        new_v=new_v,
    )
    lse = run_splits(q, keys, options, out, o_part, ml_part, arch)
    return out if lse is None else (out, lse)


def merge_states(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the results of attention over two disjoint sets of keys into that over both.

    A state whose lse is -inf has seen nothing: its values are not read, and two such states give such a
    state.

    Args:
        o_a: ``[T, Hq, D]`` float16, bfloat16 or float32, normalised; D from 1 to 256.
        lse_a: ``[T, Hq]`` float32, natural log.
        o_b: shape of ``o_a``, one of these dtypes.
        lse_b: ``[T, Hq]`` float32.
        out: shape and dtype of ``o_a``, written whole; may be ``o_a`` or ``o_b`` itself. None allocates it.

    Returns:
        ``[T, Hq, D]`` of the dtype of ``o_a``, and ``[T, Hq]`` float32.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: a dtype does not fit.
        RuntimeError: the kernels cannot run on this device.
    """
    arch_of(o_a.device)
    check_shape("o_a", o_a, ("T", "Hq", "D"))
    check_shape("o_b", o_b, o_a.shape)
    tokens, q_heads, head_dim = o_a.shape
    if not 1 <= head_dim <= 256:
        raise ValueError(f"o_a: wanted a head_dim from 1 to 256, got {head_dim}; split the last dimension")
    for name, tensor in (("o_a", o_a), ("o_b", o_b)):
        check_float(name, tensor)
        check_rows(name, tensor, o_a.device)
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_float(name, tensor, (torch.float32,))
        check_shape(name, tensor, (tokens, q_heads))
        check_device(name, tensor, o_a.device)
    out = take_out(out, o_a.shape, o_a.dtype, o_a.device)
    lse = torch.empty(tokens, q_heads, dtype=torch.float32, device=o_a.device)
    if lse.numel() == 0:
        return out, lse
    config = states_config(q_heads, head_dim)
    with on_device(o_a):
        merge_states_kernel[(tokens, -(-q_heads // config.block_m))](
            o_a,
            lse_a,
            o_b,
            lse_b,
            out,
            lse,
            *o_a.stride()[:2],
            *o_b.stride()[:2],
            *lse_a.stride(),
            *lse_b.stride(),
            *out.stride()[:2],
            q_heads,
            **states_constexprs(head_dim, row_alignment(o_a, o_b, out), config),
            **launch_options(config),
        )
    return out, lse
