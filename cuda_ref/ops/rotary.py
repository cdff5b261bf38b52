"""Rotary position embedding: out of place, in place on q and k, and with the write of K and V."""

from __future__ import annotations

from typing import Literal

import torch

from astrai_triton.ops.check import check_device, check_float, check_ints, check_shape, take_out
from astrai_triton.ops.check_rotary import check_freqs, check_heads
from cuda_ref.ops.call import Call, check_available
from cuda_ref.ops.check import check_kv_dtype, refuse_scales

Pairing = Literal["adjacent", "half"]


def rotary_emb(
    x: torch.Tensor,
    freqs_cis: torch.Tensor,
    *,
    pairing: Pairing = "adjacent",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``astrai_triton.ops.rotary_emb``: rotate the first R elements of every head, copy the others.

    Computes in float32 and rounds once. Without gradients.

    Args:
        x: ``[T, H, D]`` or ``[B, L, H, D]`` float16, bfloat16 or float32; any strides, the last one unit.
            D at most 1024.
        freqs_cis: ``[..., R/2, 2]`` float32 (cos, sin), leading dimensions those of x without H or
            broadcastable to them; the last two dimensions contiguous. R is even, from 2 to D.
        pairing: elements that turn together: "adjacent" (2i, 2i + 1), "half" (i, i + R/2).
        out: shape and dtype of x; overwritten. It may be x itself, but must not overlap it in any other way.

    Returns:
        ``out``, or a new contiguous tensor.

    Raises:
        RuntimeError: no build runs on this device.
        TypeError: a dtype that is not supported.
        ValueError: shapes, strides or devices that do not fit, an unknown pairing, x requires a gradient.
    """
    check_available(x.device)
    check_heads("x", x)
    freqs_cis = check_freqs(freqs_cis, x, "x", pairing)
    out = take_out(out, x.shape, x.dtype, x.device)
    call = _start(x, out, freqs_cis)
    _run(call, x.dtype, pairing)
    return out


def rotary_qk_(
    q: torch.Tensor, k: torch.Tensor, freqs_cis: torch.Tensor, *, pairing: Pairing = "adjacent"
) -> None:
    """As ``astrai_triton.ops.rotary_qk_``: rotate q and k in place, in one launch.

    Args:
        q: ``[T, Hq, D]`` or ``[B, L, Hq, D]``, as x of ``rotary_emb``; rotated in place.
        k: shape of q but any number of heads, dtype of q; rotated in place. Must not overlap q.
        freqs_cis: as for ``rotary_emb``.
        pairing: as for ``rotary_emb``.

    Raises:
        RuntimeError: no build runs on this device.
        TypeError: a dtype that is not supported.
        ValueError: shapes, strides or devices that do not fit, an unknown pairing, a gradient is required.
    """
    check_available(q.device)
    check_heads("q", q)
    check_heads("k", k)
    freqs_cis = check_freqs(freqs_cis, q, "q", pairing)
    check_shape("k", k, (*q.shape[:-2], "Hk", q.shape[-1]))
    for name, tensor in (("q", q), ("k", k)):
        take_out(tensor, tensor.shape, q.dtype, q.device, name)
    call = _start(q, q, freqs_cis)
    _add_heads(call, "k", k)
    _add_heads(call, "k_out", k, is_writable=True)
    call.set(kv_heads=k.shape[-2])
    _run(call, q.dtype, pairing)


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
    """As ``astrai_triton.ops.rotary_append_``: rotate q in place, write rotated k, and v, to their slots.

    Args:
        q: ``[T, Hq, D]``, as x of ``rotary_emb``; rotated in place.
        k: ``[T, Hkv, D]``, dtype of q; not changed.
        v: ``[T, Hkv, Dv]``, dtype of q, Dv at most 1024.
        freqs_cis: ``[T, R/2, 2]`` float32, as for ``rotary_emb``.
        k_buffer: ``[slots, Hkv, D]``, dtype of q; written in place.
        v_buffer: ``[slots, Hkv, Dv]``, dtype of q; written in place.
        out_cache_loc: ``[T]`` int32, slot of each row, no slot twice; a row whose slot is negative or not in
            the pool is not written.
        pairing: as for ``rotary_emb``.
        k_scale, v_scale: None; there is no fp8 here.

    Raises:
        RuntimeError: no build runs on this device.
        TypeError: a dtype that is not supported.
        ValueError: shapes, strides or devices that do not fit, an unknown pairing, a gradient is required.
    """
    check_available(q.device)
    check_shape("q", q, ("T", "Hq", "D"))
    refuse_scales(k_scale, v_scale)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_heads(name, tensor)
    tokens, _, head_dim = q.shape
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
    for name, buffer, dim in (("k_buffer", k_buffer, head_dim), ("v_buffer", v_buffer, value_dim)):
        check_kv_dtype(name, buffer, q)
        take_out(buffer, (num_slots, kv_heads, dim), q.dtype, q.device, name)
    call = _start(q, q, freqs_cis)
    _add_heads(call, "k", k)
    call.add("v", v, "v_stride_t", "v_stride_h")
    call.add("k_pool", k_buffer, "k_pool_stride_n", "k_pool_stride_h", is_writable=True)
    call.add("v_pool", v_buffer, "v_pool_stride_n", "v_pool_stride_h", is_writable=True)
    call.add("out_cache_loc", out_cache_loc, "loc_stride")
    call.set(kv_heads=kv_heads, value_dim=value_dim, num_slots=num_slots)
    _run(call, q.dtype, pairing)


def _start(q: torch.Tensor, out: torch.Tensor, freqs_cis: torch.Tensor) -> Call:
    """A call that rotates q into ``out``."""
    call = Call("RotaryParams", q.device)
    _add_heads(call, "q", q)
    _add_heads(call, "q_out", out, is_writable=True)
    call.add("freqs", freqs_cis, *_leading("freqs", q))
    call.set(
        num_b=q.shape[0] if q.dim() == 4 else 1,
        num_t=q.shape[-3],
        q_heads=q.shape[-2],
        head_dim=q.shape[-1],
        rotary_dim=2 * freqs_cis.shape[-2],
    )
    return call


def _add_heads(call: Call, name: str, x: torch.Tensor, is_writable: bool = False) -> None:
    call.add(name, x, *_leading(name, x), f"{name}_stride_h", is_writable=is_writable)


def _leading(name: str, x: torch.Tensor) -> tuple[str, ...]:
    """Fields of the strides of tokens; packed rows are one batch."""
    return (f"{name}_stride_b", f"{name}_stride_t") if x.dim() == 4 else (f"{name}_stride_t",)


def _run(call: Call, dtype: torch.dtype, pairing: Pairing) -> None:
    call.run("rotary_emb", dtype, getattr(call.extension.Pairing, pairing))
