"""The joining of softmax states."""

from __future__ import annotations

import torch

from astrai_triton.ops.check import check_device, check_float, check_rows, check_shape, take_out
from cuda_ref.ops.call import Call, check_available


def merge_states(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``astrai_triton.ops.merge_states``.

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
        RuntimeError: no build runs on this device.
    """
    check_available(o_a.device)
    check_shape("o_a", o_a, ("T", "Hq", "D"))
    check_shape("o_b", o_b, o_a.shape)
    tokens, heads, head_dim = o_a.shape
    if not 1 <= head_dim <= 256:
        raise ValueError(f"o_a: wanted a head_dim from 1 to 256, got {head_dim}; split the last dimension")
    for name, tensor in (("o_a", o_a), ("o_b", o_b)):
        check_float(name, tensor)
        check_rows(name, tensor, o_a.device)
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_float(name, tensor, (torch.float32,))
        check_shape(name, tensor, (tokens, heads))
        check_device(name, tensor, o_a.device)
    out = take_out(out, o_a.shape, o_a.dtype, o_a.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=o_a.device)
    call = Call("MergeParams", o_a.device)
    call.add("o_a", o_a, "o_a_stride_t", "o_a_stride_h")
    call.add("lse_a", lse_a, "lse_a_stride_t", "lse_a_stride_h")
    call.add("o_b", o_b, "o_b_stride_t", "o_b_stride_h")
    call.add("lse_b", lse_b, "lse_b_stride_t", "lse_b_stride_h")
    call.add("out", out, "out_stride_t", "out_stride_h", is_writable=True)
    call.add("lse", lse, is_writable=True)
    call.set(tokens=tokens, heads=heads, head_dim=head_dim)
    call.run("merge_states", o_a.dtype, call.dtype(o_b.dtype))
    return out, lse
