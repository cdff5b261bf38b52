"""Checks of attention before a launch; what is shared with the Triton ops comes from there."""

from __future__ import annotations

from typing import Any

import torch

from astrai_triton.ops.check import check_device, check_float, check_head_dim, check_rows, check_shape
from cuda_ref.ops.call import check_available

WINDOW_MAX = 1 << 30
"""A window that reaches everything, as ``attn_common.h`` has it."""


def check_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    k_name: str = "k",
    v_name: str = "v",
    k_scale: float | None,
    v_scale: float | None,
) -> None:
    """Dtypes, devices, strides and head shapes of attention; the last two dimensions are heads, head_dim.

    Shapes in front of the heads are the caller's to check.
    """
    check_available(q.device)
    check_float("q", q)
    refuse_scales(k_scale, v_scale)
    for name, tensor in (("q", q), (k_name, k), (v_name, v)):
        if tensor.dim() < 2:
            raise ValueError(f"{name}: wanted [..., heads, head_dim], got {list(tensor.shape)}; reshape it")
        check_kv_dtype(name, tensor, q)
        check_rows(name, tensor, q.device)
        check_head_dim(name, tensor.shape[-1])
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{k_name}: wanted the head_dim of q, {q.shape[-1]}, got {k.shape[-1]}; slice or pad it"
        )
    check_shape(v_name, v, (*k.shape[:-1], "Dv"))
    q_heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or q_heads == 0 or q_heads % kv_heads:
        raise ValueError(
            f"q: wanted a multiple of {kv_heads} kv heads, at least one, got {q_heads} heads; "
            "repeat or drop heads"
        )


def check_kv_dtype(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    """The dtype of q."""
    if tensor.dtype != q.dtype:
        wanted, got = (str(dtype).removeprefix("torch.") for dtype in (q.dtype, tensor.dtype))
        raise TypeError(
            f"{name}: wanted the dtype of q, {wanted}, got {got}; cuda_ref has no fp8, cast it first"
        )


def refuse_scales(k_scale: float | None, v_scale: float | None) -> None:
    """Scales belong to fp8, which is not here."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            raise ValueError(f"{name}: wanted None, since cuda_ref has no fp8, got {scale}; leave it out")


def check_length(name: str, length: int) -> None:
    """A position plus a window stays an int."""
    if length >= WINDOW_MAX:
        raise ValueError(f"{name}: wanted fewer than {WINDOW_MAX} positions, got {length}; split them")


def check_scratch(
    o_part: torch.Tensor | None,
    ml_part: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The caller's scratch once checked; ``shape`` is that of ``o_part`` at least. None if there is none."""
    batch, q_heads, splits, value_dim = shape
    if o_part is None and ml_part is None:
        return None
    if o_part is None or ml_part is None:
        missing = "o_part" if o_part is None else "ml_part"
        raise ValueError(f"{missing}: wanted together with its partner, got None; pass both or neither")
    check_shape("o_part", o_part, (batch, q_heads, "S", value_dim))
    check_shape("ml_part", ml_part, (batch, q_heads, o_part.shape[2], 2))
    if o_part.shape[2] < splits:
        raise ValueError(
            f"o_part: wanted room for {splits} splits, got {o_part.shape[2]}; enlarge it or lower max_kv_len"
        )
    for name, tensor in (("o_part", o_part), ("ml_part", ml_part)):
        check_float(name, tensor, (torch.float32,))
        check_device(name, tensor, device)
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name}: wanted it contiguous, got strides {tensor.stride()}; allocate it by itself"
            )
    return o_part, ml_part


def choose_variant(variant: str, has_mma: bool, *tensors: torch.Tensor | None) -> str:
    """ "mma" or "scalar": what was asked for, or for "auto" the tensor cores where they can do the call.

    Raises:
        ValueError: an unknown variant.
    """
    if variant not in ("auto", "scalar", "mma"):
        raise ValueError(f"variant: wanted 'auto', 'scalar' or 'mma', got {variant!r}; spell it so")
    if variant != "auto":
        return variant
    given = [tensor for tensor in tensors if tensor is not None]
    is_able = has_mma and all(tensor.dtype != torch.float32 and _is_aligned(tensor) for tensor in given)
    return "mma" if is_able else "scalar"


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Every row starts at a multiple of 16 bytes. A dimension of size 1 has no say."""
    return tensor.data_ptr() % 16 == 0 and all(
        size <= 1 or stride * tensor.element_size() % 16 == 0
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )


def describe_options(
    head_dim: int, softmax_scale: float | None, window_size: tuple[int, int], softcap: float, is_causal: bool
) -> dict[str, Any]:
    """The options as fields of ``AttnParams``."""
    left, right = (WINDOW_MAX if side < 0 else min(side, WINDOW_MAX) for side in window_size)
    return {
        "score_scale": head_dim**-0.5 if softmax_scale is None else softmax_scale,
        "window_left": left,
        "window_right": 0 if is_causal else right,
        "softcap": softcap,
    }
