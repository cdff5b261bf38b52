"""Rotary position embedding on tensors: out of place, in place on q and k, and with the write of K and V."""

from __future__ import annotations

import math
from typing import Literal

import torch

from astrai_triton.kernels.append import append_rotated_kernel
from astrai_triton.kernels.rotary import rotate_qk_kernel
from astrai_triton.ops.check import (
    check_device,
    check_float,
    check_ints,
    check_pool_dtype,
    check_scale,
    check_shape,
    take_out,
)
from astrai_triton.ops.check_rotary import MAX_HEAD_DIM as MAX_HEAD_DIM
from astrai_triton.ops.check_rotary import check_freqs, check_heads
from astrai_triton.ops.launch import arch_of, on_device, pad_block, row_alignment
from astrai_triton.ops.launch_rotary import (
    FP_FUSION,
    choose_rotary,
    count_blocks,
    rotary_constexprs,
)

Pairing = Literal["adjacent", "half"]

_MAX_PROGRAMS = 2**31 - 1


def rotary_emb(
    x: torch.Tensor,
    freqs_cis: torch.Tensor,
    *,
    pairing: Pairing = "adjacent",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the first R elements of every head by the angles of its position; the others are copied.

    Computes in float32 and rounds once. Without gradients.

    Args:
        x: ``[T, H, D]`` or ``[B, L, H, D]`` float16, bfloat16 or float32; any strides, the last one unit.
            D at most 1024.
        freqs_cis: ``[..., R/2, 2]`` float32 (cos, sin), leading dimensions those of x without H or
            broadcastable to them; the last two dimensions contiguous. R is even, from 2 to D.
        pairing: elements that turn together: "adjacent" (2i, 2i + 1), "half" (i, i + R/2).
        out: shape and dtype of x; overwritten. It may be x itself, which is then rotated in place, but must
            not overlap it in any other way.

    Returns:
        ``out``, or a new contiguous tensor.

    Raises:
        RuntimeError: the device cannot run Triton kernels.
        TypeError: a dtype that is not supported.
        ValueError: shapes, strides or devices that do not fit, an unknown pairing, x requires a gradient.
    """
    arch_of(x.device)
    check_heads("x", x)
    freqs_cis = check_freqs(freqs_cis, x, "x", pairing)
    out = take_out(out, x.shape, x.dtype, x.device)
    is_in_place = out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
    _launch_rotate(x, None, freqs_cis, out, None, pairing, is_in_place)
    return out


def rotary_qk_(
    q: torch.Tensor, k: torch.Tensor, freqs_cis: torch.Tensor, *, pairing: Pairing = "adjacent"
) -> None:
    """Rotate q and k in place, in one launch. Elements from R on are neither read nor written.

    Args:
        q: ``[T, Hq, D]`` or ``[B, L, Hq, D]``, as x of ``rotary_emb``; rotated in place.
        k: shape of q but any number of heads, dtype of q; rotated in place. Must not overlap q.
        freqs_cis: as for ``rotary_emb``.
        pairing: as for ``rotary_emb``.

    Raises:
        RuntimeError: the device cannot run Triton kernels.
        TypeError: a dtype that is not supported.
        ValueError: shapes, strides or devices that do not fit, an unknown pairing, a gradient is required.
    """
    arch_of(q.device)
    check_heads("q", q)
    check_heads("k", k)
    freqs_cis = check_freqs(freqs_cis, q, "q", pairing)
    check_shape("k", k, (*q.shape[:-2], "Hk", q.shape[-1]))
    for name, tensor in (("q", q), ("k", k)):
        take_out(tensor, tensor.shape, q.dtype, q.device, name)
    _launch_rotate(q, k, freqs_cis, q, k, pairing, True)


def rotary_append_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    freqs_cis: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *,
    pairing: Pairing = "adjacent",
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> None:
    """Rotate q in place and write rotated k, and v, to their slots of the KV pool, in one launch.

    The pool holds the bits it would after ``rotary_qk_`` and a copy. What goes to fp8 is divided by its scale
    and, beyond the largest finite value, held at that; so does ``attn_paged_decode`` with ``new_k``.

    Args:
        q: ``[T, Hq, D]``, as x of ``rotary_emb``; rotated in place.
        k: ``[T, Hkv, D]``, dtype of q; not changed.
        v: ``[T, Hkv, Dv]``, dtype of q, Dv at most 1024.
        freqs_cis: ``[T, R/2, 2]`` float32, as for ``rotary_emb``.
        k_buffer: ``[slots, Hkv, D]``, dtype of q, or fp8 (e4m3 from sm_89, e5m2) with a 16-bit q; written in
            place.
        v_buffer: ``[slots, Hkv, Dv]``, dtype of k_buffer; written in place.
        out_cache_loc: ``[T]`` int32, slot of each row, no slot twice; a row whose slot is negative or not in
            the pool is not written.
        pairing: as for ``rotary_emb``.
        k_scale: what fp8 K is to be multiplied by when it is read, > 0; None is 1.
        v_scale: what fp8 V is to be multiplied by when it is read, > 0; None is 1.

    Raises:
        RuntimeError: the device cannot run Triton kernels.
        TypeError: a dtype that is not supported.
        ValueError: shapes, strides or devices that do not fit, an unknown pairing, a gradient is required, a
            scale without fp8 or not above 0.
    """
    arch = arch_of(q.device)
    check_shape("q", q, ("T", "Hq", "D"))
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_heads(name, tensor)
    tokens, q_heads, head_dim = q.shape
    freqs_cis = check_freqs(freqs_cis, q, "q", pairing)
    check_shape("k", k, (tokens, "Hkv", head_dim))
    kv_heads, value_dim = k.shape[1], v.shape[-1]
    check_shape("v", v, (tokens, kv_heads, "Dv"))
    for name, tensor in (("k", k), ("v", v)):
        check_float(name, tensor, (q.dtype,))
        check_device(name, tensor, q.device)
    check_ints("out_cache_loc", out_cache_loc, (tokens,), q.device)
    num_slots = k_buffer.shape[0] if k_buffer.dim() else 0
    take_out(q, q.shape, q.dtype, q.device, "q")
    check_pool_dtype("k_buffer", k_buffer, q, arch)
    pool_dtype = k_buffer.dtype
    take_out(k_buffer, (num_slots, kv_heads, head_dim), pool_dtype, q.device, "k_buffer")
    take_out(v_buffer, (num_slots, kv_heads, value_dim), pool_dtype, q.device, "v_buffer")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(name, scale, pool_dtype)
    inverse_scales = [1.0 if scale is None else 1 / scale for scale in (k_scale, v_scale)]

    heads, rotary_dim = (q_heads, kv_heads, kv_heads), 2 * freqs_cis.shape[-2]
    config = choose_rotary(heads, rotary_dim, max(head_dim, value_dim))
    programs = _count_programs("q", tokens, heads, config.block_m)
    if programs == 0:
        return
    align = _alignment(freqs_cis, q, k, v, k_buffer, v_buffer)
    with on_device(q):
        append_rotated_kernel[(programs,)](
            q, k, v, freqs_cis, k_buffer, v_buffer, out_cache_loc,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], freqs_cis.stride(0),
            *k_buffer.stride()[:2], *v_buffer.stride()[:2], out_cache_loc.stride(0),
            num_slots, q_heads, kv_heads, *inverse_scales,
            **rotary_constexprs(
                config, head_dim, rotary_dim, pairing == "adjacent", rotary_dim < head_dim, align
            ),
            VALUE_DIM=value_dim,
            BLOCK_V=pad_block(value_dim, 1),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=FP_FUSION,
        )  # fmt: skip


def _launch_rotate(
    q: torch.Tensor,
    k: torch.Tensor | None,
    freqs_cis: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor | None,
    pairing: Pairing,
    is_in_place: bool,
) -> None:
    """One launch over all heads; without k the kernel gets q in its place and 0 heads of it."""
    *leading, q_heads, head_dim = q.shape
    rotary_dim = 2 * freqs_cis.shape[-2]
    k_heads = 0 if k is None else k.shape[-2]
    heads = (q_heads,) if k is None else (q_heads, k_heads)
    has_rest = rotary_dim < head_dim and not is_in_place
    config = choose_rotary(heads, rotary_dim, head_dim if has_rest else rotary_dim)
    programs = _count_programs("x" if k is None else "q", math.prod(leading), heads, config.block_m)
    if programs == 0:
        return
    k, k_out = (q, q_out) if k is None or k_out is None else (k, k_out)
    with on_device(q):
        rotate_qk_kernel[(programs,)](
            q, k, freqs_cis, q_out, k_out,
            *_strides(q, 3), *_strides(k, 3), *_strides(freqs_cis, 2),
            *_strides(q_out, 3), *_strides(k_out, 3),
            leading[-1], q_heads, k_heads,
            **rotary_constexprs(
                config, head_dim, rotary_dim, pairing == "adjacent", has_rest,
                _alignment(freqs_cis, q, k, q_out, k_out),
            ),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=FP_FUSION,
        )  # fmt: skip


def _count_programs(name: str, tokens: int, heads: tuple[int, ...], block: int) -> int:
    programs = tokens * count_blocks(heads, block)
    if programs > _MAX_PROGRAMS:
        raise ValueError(
            f"{name}: wanted at most {_MAX_PROGRAMS} programs, got {programs} for {tokens} tokens; split it"
        )
    return programs


def _strides(tensor: torch.Tensor, count: int) -> tuple[int, ...]:
    """The first ``count`` strides, of batch first; packed rows are one batch."""
    strides = tensor.stride()
    return strides[:count] if tensor.dim() == 4 else (0, *strides[: count - 1])


def _alignment(freqs_cis: torch.Tensor, *tensors: torch.Tensor) -> int:
    """Bytes that every row start is a multiple of, 16 or 1; a row of freqs_cis is one position."""
    if freqs_cis.data_ptr() % 16 or any(stride % 4 for stride in freqs_cis.stride()[:-2]):
        return 1
    return row_alignment(*tensors)
