"""Rotary position embedding, independent of the attention backend: one kernel, or torch with gradients."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Literal

import torch

from astrai_triton.backend.base import ATTN_BACKEND, derive_forward
from astrai_triton.backend.fused import is_interpreted
from astrai_triton.backend.selection import current_backend
from astrai_triton.kvcache import KVCache

Pairing = Literal["adjacent", "half"]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def apply_rotary_emb(
    x: torch.Tensor,
    freqs_cis: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    *,
    pairing: Pairing = "adjacent",
) -> torch.Tensor:
    """Rotate the first R elements of every head by the angles of its position; the others stay as they are.

    Computes in float32 and rounds once. Differentiable in ``x``. On a GPU one Triton kernel does it, unless a
    gradient is wanted or the kernel does not take the call (strides, traced code): then torch does. On a CPU
    the kernel runs only under Triton's interpreter and where the backend "triton" is chosen.

    Args:
        x: ``[..., H, D]`` float16, bfloat16 or float32, such as ``[T, H, D]`` or ``[B, L, H, D]``.
        freqs_cis: ``[..., R/2, 2]`` float32 (cos, sin), leading dimensions those of x without H, or
            broadcastable to them; or the pair (cos, sin), each ``[..., R/2]``. R is even and at most D.
        pairing: elements that turn together: "adjacent" (2i, 2i + 1), "half" (i, i + R/2).

    Returns:
        A new tensor of the shape and dtype of x.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: shapes that do not fit, or an unknown pairing.
        UnknownBackendError: ``ASTR_BACKEND`` names no backend; looked at only under the interpreter.
    """
    if isinstance(freqs_cis, tuple):
        cos, sin = freqs_cis
        if cos.shape != sin.shape:
            raise ValueError(
                f"cos, sin: wanted the same shape, got {tuple(cos.shape)} and {tuple(sin.shape)}"
            )
        freqs_cis = torch.stack((cos, sin), dim=-1)
    _check(x, freqs_cis)
    if pairing == "adjacent":
        rotate = _rotate_adjacent
    elif pairing == "half":
        rotate = _rotate_half
    else:
        raise ValueError(f"pairing: wanted 'adjacent' or 'half', got {pairing!r}")
    if _is_fused(x, freqs_cis):
        out: torch.Tensor = _load_ops().rotary_emb(x, freqs_cis, pairing=pairing)
        return out
    rotary_dim = 2 * freqs_cis.shape[-2]
    if rotary_dim == x.shape[-1]:
        return rotate(x, freqs_cis)
    return torch.cat((rotate(x[..., :rotary_dim], freqs_cis), x[..., rotary_dim:]), dim=-1)


def append_rotated_(
    qk: torch.Tensor,
    v: torch.Tensor,
    freqs_cis: torch.Tensor,
    kv_cache: KVCache | None,
    layer_id: int,
    q_heads: int,
    *,
    pairing: Pairing = "adjacent",
) -> bool:
    """Rotate q in place and write rotated k, and v, into the KV cache, if one kernel does all that here.

    It does in a prefill, where the backend "triton" is chosen or comes first and its rotary kernel takes the
    call. The bits are those of ``apply_rotary_emb`` and the write of ``attention``. In decode the attention
    kernel itself appends.

    Args:
        qk: ``[T, Hq + Hkv, D]``, q before k; the heads of q are rotated in place, those of k stay.
        v: ``[T, Hkv, Dv]``, dtype of qk.
        freqs_cis: ``[T, R/2, 2]`` float32, as for ``apply_rotary_emb``.
        kv_cache: as for ``attention``; written in place.
        layer_id: as for ``attention``.
        q_heads: Hq.
        pairing: as for ``apply_rotary_emb``.

    Returns:
        Whether it was done: call ``attention`` with ``is_stored``. If not, nothing was touched: rotate with
        ``apply_rotary_emb``, and ``attention`` writes.

    Raises:
        TypeError, ValueError: qk, v and the cache do not fit together.
        UnknownBackendError: ``ASTR_BACKEND`` names no backend.
    """
    if kv_cache is None or derive_forward(kv_cache) == "decode":
        return False
    if not _is_fused(qk, freqs_cis) or current_backend() not in (None, ATTN_BACKEND.TRITON):
        return False
    _load_ops().rotary_append_(
        qk[:, :q_heads],
        qk[:, q_heads:],
        v,
        freqs_cis,
        kv_cache.k_buffer[layer_id],
        kv_cache.v_buffer[layer_id],
        kv_cache.out_cache_loc,
        pairing=pairing,
    )
    return True


def _check(x: torch.Tensor, freqs_cis: torch.Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise TypeError(f"x: wanted float16, bfloat16 or float32, got {x.dtype}")
    if freqs_cis.dtype != torch.float32:
        raise TypeError(
            f"freqs_cis: wanted float32, got {freqs_cis.dtype}; build the table in float32, "
            "low precision loses positions"
        )
    if freqs_cis.dim() < 2 or freqs_cis.shape[-1] != 2:
        raise ValueError(
            f"freqs_cis: wanted [..., rotary_dim / 2, 2] of (cos, sin), got {tuple(freqs_cis.shape)}"
        )
    if x.dim() < 2 or 2 * freqs_cis.shape[-2] > x.shape[-1]:
        raise ValueError(
            f"freqs_cis: wanted rotary_dim at most the head_dim of x, got {2 * freqs_cis.shape[-2]} "
            f"for x {tuple(x.shape)}"
        )
    leading, wanted = freqs_cis.shape[:-2], x.shape[:-2]
    if leading != wanted and (
        len(leading) > len(wanted)
        or any(have not in (1, want) for have, want in zip(reversed(leading), reversed(wanted), strict=False))
    ):
        raise ValueError(
            f"freqs_cis: wanted leading dimensions {tuple(wanted)} of x without heads, or broadcastable "
            f"to them, got {tuple(leading)}"
        )


def _is_fused(x: torch.Tensor, freqs_cis: torch.Tensor) -> bool:
    """Whether the kernel runs the call. What it refuses is not an error here: torch can do it."""
    wanted = current_backend() is ATTN_BACKEND.TRITON if is_interpreted() else x.is_cuda
    if not wanted or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and (x.requires_grad or freqs_cis.requires_grad):
        return False
    # A subclass (fake, distributed) has no memory that a kernel could read.
    if type(x) is not torch.Tensor or type(freqs_cis) is not torch.Tensor or freqs_cis.device != x.device:
        return False
    pairs, head_dim = freqs_cis.shape[-2], x.shape[-1]
    return (
        x.dim() in (3, 4)
        and (x.stride(-1) == 1 or head_dim == 1)
        and pairs > 0
        and freqs_cis.stride(-1) == 1
        and (freqs_cis.stride(-2) == 2 or pairs == 1)
        and _can_launch(x.device)
        and head_dim <= _load_ops().MAX_HEAD_DIM
    )


@functools.cache
def _load_ops() -> ModuleType:
    # Importing Triton takes long, and a process that never comes here does not need it.
    return importlib.import_module("astrai_triton.ops.rotary")


@functools.cache
def _can_launch(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        importlib.import_module("astrai_triton.ops.launch").arch_of(device)
    except RuntimeError:
        return False
    return True


def _rotate_adjacent(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """A pair is a complex number, turned by one multiplication."""
    pairs = x.float().reshape(*x.shape[:-1], freqs_cis.shape[-2], 2)
    turned = _as_complex(pairs) * _as_complex(freqs_cis).unsqueeze(-2)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def _rotate_half(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), as (b, a) * (-sin, sin) + (a, b) * (cos, cos)."""
    cos, sin = freqs_cis.unsqueeze(-3).unbind(-1)
    full = x.float()
    first, second = full.chunk(2, dim=-1)
    turned = torch.cat((second, first), dim=-1).mul_(torch.cat((-sin, sin), dim=-1))
    return turned.addcmul_(full, torch.cat((cos, cos), dim=-1)).to(x.dtype)


def _as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """``[..., 2]`` seen as complex, copied only where its strides allow no such view."""
    if pairs.stride(-1) != 1 or pairs.storage_offset() % 2 or any(s % 2 for s in pairs.stride()[:-1]):
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(pairs)
