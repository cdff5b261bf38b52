"""Checks before a launch. Messages name the argument, what was wanted, what came and the way out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from astrai_triton.ops.launch import FP8_DTYPES, MAX_GRID_SIDE, Arch, arch_of

Q_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
UNBOUNDED = (-1, -1)

_MIN_HEAD_DIM, _MAX_HEAD_DIM, _HEAD_DIM_STEP = 16, 256, 8


def check_float(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype] = Q_DTYPES) -> None:
    """The dtype is one of ``dtypes``; raises TypeError."""
    if tensor.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: wanted one of {wanted}, got {_dtype(tensor)}; cast it first")


def check_shape(name: str, tensor: torch.Tensor, wanted: Sequence[int | str]) -> None:
    """The shape is as wanted; a string stands for any size and names it in the message."""
    shape = tensor.shape
    if len(shape) == len(wanted):
        for got, want in zip(shape, wanted, strict=True):
            if got != want and not isinstance(want, str):
                break
        else:
            return
    spelled = ", ".join(map(str, wanted))
    raise ValueError(f"{name}: wanted shape [{spelled}], got {list(shape)}; reshape or slice it")


def check_rows(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """On the device, and its last dimension has unit stride."""
    check_device(name, tensor, device)
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
        raise ValueError(
            f"{name}: wanted a unit last stride, got strides {tensor.stride()}; call .contiguous() on it"
        )


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """The tensor is where q is."""
    if tensor.device != device:
        raise ValueError(
            f"{name}: wanted the device of the first tensor, {device}, got {tensor.device}; "
            "move it with .to()"
        )


def check_ints(name: str, tensor: torch.Tensor, wanted: Sequence[int | str], device: torch.device) -> None:
    """An int32 tensor of the wanted shape, any strides."""
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}: wanted int32, got {_dtype(tensor)}; cast it with .to(torch.int32)")
    check_shape(name, tensor, wanted)
    check_device(name, tensor, device)


def check_bools(name: str, tensor: torch.Tensor, wanted: Sequence[int | str], device: torch.device) -> None:
    """A bool tensor of the wanted shape, any strides."""
    if tensor.dtype != torch.bool:
        raise TypeError(
            f"{name}: wanted bool (True = keep), got {_dtype(tensor)}; compare your mask with 0 first"
        )
    check_shape(name, tensor, wanted)
    check_device(name, tensor, device)


def check_head_dim(name: str, head_dim: int) -> None:
    """A size of the last dimension that the kernels have tiles for."""
    if head_dim % _HEAD_DIM_STEP or not _MIN_HEAD_DIM <= head_dim <= _MAX_HEAD_DIM:
        raise ValueError(
            f"{name}: wanted a head_dim that is a multiple of {_HEAD_DIM_STEP} from {_MIN_HEAD_DIM} to "
            f"{_MAX_HEAD_DIM}, got {head_dim}; pad it with zeros, or use torch_native attention"
        )


def check_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    k_name: str = "k",
    v_name: str = "v",
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Arch:
    """Dtypes, devices, strides and head shapes of attention; the last two dimensions are heads, head_dim.

    Shapes in front of the heads are the caller's to check. Returns the facts of the device.
    """
    arch = arch_of(q.device)
    check_float("q", q)
    _check_kv_dtype(q, k, v, k_name, v_name, arch)
    for name, tensor in (("q", q), (k_name, k), (v_name, v)):
        if tensor.dim() < 2:
            raise ValueError(f"{name}: wanted [..., heads, head_dim], got {list(tensor.shape)}")
        check_rows(name, tensor, q.device)
        check_head_dim(name, tensor.shape[-1])
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{k_name}: wanted the head_dim of q, {q.shape[-1]}, got {k.shape[-1]}; slice or pad"
        )
    check_shape(v_name, v, (*k.shape[:-1], "Dv"))
    q_heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or q_heads == 0 or q_heads % kv_heads:
        raise ValueError(
            f"q: wanted a multiple of {kv_heads} kv heads, at least one, got {q_heads} heads; "
            "repeat or drop heads"
        )
    if kv_heads > MAX_GRID_SIDE:
        raise ValueError(f"{k_name}: wanted at most {MAX_GRID_SIDE} kv heads, got {kv_heads}; split them")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(name, scale, k.dtype)
    return arch


def _check_kv_dtype(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_name: str, v_name: str, arch: Arch
) -> None:
    if k.dtype != v.dtype:
        raise TypeError(f"{v_name}: wanted the dtype of {k_name}, {_dtype(k)}, got {_dtype(v)}; cast it")
    check_pool_dtype(k_name, k, q, arch)


def check_pool_dtype(name: str, pool: torch.Tensor, q: torch.Tensor, arch: Arch) -> None:
    """The dtype of K or V is that of q, or an fp8 one that the architecture has beside a 16-bit q."""
    if pool.dtype == q.dtype:
        return
    if pool.dtype not in FP8_DTYPES or q.dtype == torch.float32:
        raise TypeError(
            f"{name}: wanted the dtype of q, {_dtype(q)}, or an fp8 one with a 16-bit q, "
            f"got {_dtype(pool)}; cast it first"
        )
    if pool.dtype == torch.float8_e4m3fn and not arch.has_fp8:
        raise ValueError(
            f"{name}: wanted an architecture from sm_89 for float8_e4m3fn, got {arch.name}; use float8_e5m2"
        )


def check_scale(name: str, scale: float | None, dtype: torch.dtype) -> None:
    """A scale of K or V of ``dtype``: a finite number above 0, and only for fp8."""
    if scale is None:
        return
    if dtype not in FP8_DTYPES:
        spelled = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name}: wanted None unless K and V are fp8, got {scale} with {spelled}")
    if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
        raise ValueError(f"{name}: wanted a finite number > 0, got {scale!r}; read tensors beforehand")


def check_new(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    new_k: torch.Tensor | None,
    new_v: torch.Tensor | None,
) -> None:
    """The rows that decode appends: both or neither, of the dtype of q and the heads of the pool."""
    if new_k is None and new_v is None:
        return
    if new_k is None or new_v is None:
        missing = "new_k" if new_k is None else "new_v"
        raise ValueError(f"{missing}: wanted together with its partner, got None; pass both or neither")
    for name, tensor, buffer in (("new_k", new_k, k_buffer), ("new_v", new_v, v_buffer)):
        check_float(name, tensor, (q.dtype,))
        check_shape(name, tensor, (q.shape[0], *buffer.shape[1:]))
        check_rows(name, tensor, q.device)


def check_options(
    q: torch.Tensor,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None,
) -> None:
    """Ranges of the options every attention op has."""
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        raise ValueError(
            f"softmax_scale: wanted a finite number or None, got {softmax_scale}; None is 1/sqrt(D)"
        )
    if len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(
            f"window_size: wanted (left, right), each >= 0 or -1 for unbounded, got {window_size}; "
            "use (-1, -1) for no window"
        )
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap: wanted a finite number >= 0, got {softcap}; 0 turns it off")
    if sinks is None:
        return
    check_float("sinks", sinks)
    check_shape("sinks", sinks, (q.shape[-2],))
    check_rows("sinks", sinks, q.device)


def take_out(
    out: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    name: str = "out",
) -> torch.Tensor:
    """The caller's ``out`` once checked, else a new tensor. Its contents are never read."""
    if out is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    if out.dtype != dtype:
        raise TypeError(
            f"{name}: wanted {str(dtype).removeprefix('torch.')}, got {_dtype(out)}; pass another"
        )
    check_shape(name, out, shape)
    check_rows(name, out, device)
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(
            f"{name}: wanted elements of their own, got the strides {out.stride()} of an expanded tensor; "
            "call .contiguous() on it"
        )
    return out


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
