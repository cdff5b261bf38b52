"""Running split-KV decode: the splits of every request, and their merge when there is more than one."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from astrai_triton.kernels.decode import attend_decode_kernel
from astrai_triton.kernels.merge import merge_splits_kernel
from astrai_triton.ops.check import check_device, check_float, check_shape
from astrai_triton.ops.launch import MAX_GRID_SIDE, Arch, launch_options, on_device, row_alignment
from astrai_triton.ops.launch_decode import (
    WINDOW_MAX,
    DecodeFlags,
    DecodeShape,
    cover_splits,
    decode_config,
    decode_constexprs,
    decode_grid,
    merge_config,
    merge_constexprs,
    merge_grid,
)
from astrai_triton.ops.options import INT32_MAX, Options


@attrs.frozen(eq=False, kw_only=True)
class Keys:
    """Where K and V of a call lie: contiguous or paged, and the row that is to be appended."""

    k: torch.Tensor
    v: torch.Tensor
    max_kv_len: int
    dense_len: int = 0
    req_to_token: torch.Tensor | None = None
    req_pool_indices: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    new_k: torch.Tensor | None = None
    new_v: torch.Tensor | None = None


def run_splits(
    q: torch.Tensor,
    keys: Keys,
    options: Options,
    out: torch.Tensor,
    o_part: torch.Tensor | None,
    ml_part: torch.Tensor | None,
    arch: Arch,
) -> torch.Tensor | None:
    """Run the splits and, if there is more than one, the merge; q ``[B, Hq, D]``, out ``[B, Hq, Dv]``."""
    batch, q_heads, head_dim = q.shape
    kv_heads, value_dim = keys.v.shape[-2:]
    shape = DecodeShape(
        q_dtype=q.dtype,
        kv_dtype=keys.k.dtype,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        align=row_alignment(q, keys.k, keys.v, keys.new_k, keys.new_v, out),
    )
    window_left = WINDOW_MAX if options.window_size[0] < 0 else min(options.window_size[0], WINDOW_MAX)
    splits = cover_splits(keys.max_kv_len, shape.chunk, window_left)
    if splits > MAX_GRID_SIDE:
        limit = MAX_GRID_SIDE * shape.chunk
        raise ValueError(f"max_kv_len: wanted at most {limit}, got {keys.max_kv_len}; attend to fewer keys")
    parts = None
    if splits > 1:
        parts = _take_parts(o_part, ml_part, (batch, q_heads, splits, value_dim), q)
    lse = None
    if options.return_lse:
        lse = torch.empty(batch, q_heads, dtype=torch.float32, device=q.device)
    if batch == 0:
        return lse
    config = decode_config(arch, head_dim, value_dim, shape.group, q.element_size(), keys.k.element_size())
    flags = DecodeFlags(
        is_paged=keys.req_to_token is not None,
        is_split=parts is not None,
        has_new=keys.new_k is not None,
        has_mask=options.mask is not None,
        has_softcap=options.softcap > 0,
        sinks=options.sinks_dtype,
        has_lse=options.return_lse,
    )
    with on_device(q):
        attend_decode_kernel[decode_grid(shape, config, batch, splits)](
            **_split_arguments(q, keys, options, out, lse, parts, window_left),
            **decode_constexprs(shape, config, flags),
            **launch_options(config),
        )
        if parts is not None:
            _merge(shape, flags, keys, options, out, lse, parts, splits, window_left)
    return lse


def _take_parts(
    o_part: torch.Tensor | None,
    ml_part: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    q: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller's scratch once checked, else new scratch; ``shape`` is that of o_part at least."""
    batch, q_heads, splits, value_dim = shape
    if o_part is None and ml_part is None:
        o_part = torch.empty(shape, dtype=torch.float32, device=q.device)
        return o_part, torch.empty((batch, q_heads, splits, 2), dtype=torch.float32, device=q.device)
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
        check_device(name, tensor, q.device)
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name}: wanted it contiguous from a multiple of 16 bytes, got strides {tensor.stride()} at "
                f"address {tensor.data_ptr()}; allocate it by itself"
            )
    return o_part, ml_part


def _split_arguments(
    q: torch.Tensor,
    keys: Keys,
    options: Options,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    parts: tuple[torch.Tensor, torch.Tensor] | None,
    window_left: int,
) -> dict[str, Any]:
    """Run-time arguments of ``attend_decode_kernel``; what a variant does not use is None or 0."""
    k, v, new_k, new_v, table = keys.k, keys.v, keys.new_k, keys.new_v, keys.req_to_token
    mask_strides = (0, 0) if options.mask is None else (0, *options.mask.stride())[-2:]
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "new_k_ptr": new_k,
        "new_v_ptr": new_v,
        "req_to_token_ptr": table,
        "req_pool_indices_ptr": keys.req_pool_indices,
        "kv_indptr_ptr": keys.kv_indptr,
        "mask_ptr": options.mask,
        "sinks_ptr": None if parts else options.sinks,
        "out_ptr": None if parts else out,
        "lse_ptr": None if parts else lse,
        "o_part_ptr": parts[0] if parts else None,
        "ml_part_ptr": parts[1] if parts else None,
        "q_stride_b": q.stride(0),
        "q_stride_h": q.stride(1),
        "k_stride_b": 0 if table is not None else k.stride(0),
        "k_stride_n": k.stride(-3),
        "k_stride_h": k.stride(-2),
        "v_stride_b": 0 if table is not None else v.stride(0),
        "v_stride_n": v.stride(-3),
        "v_stride_h": v.stride(-2),
        "new_k_stride_b": 0 if new_k is None else new_k.stride(0),
        "new_k_stride_h": 0 if new_k is None else new_k.stride(1),
        "new_v_stride_b": 0 if new_v is None else new_v.stride(0),
        "new_v_stride_h": 0 if new_v is None else new_v.stride(1),
        "table_stride_b": 0 if table is None else table.stride(0),
        "table_stride_n": 0 if table is None else table.stride(1),
        "mask_stride_b": mask_strides[0],
        "mask_stride_n": mask_strides[1],
        "out_stride_b": out.stride(0),
        "out_stride_h": out.stride(1),
        "dense_len": keys.dense_len,
        "num_slots": min(k.shape[0], INT32_MAX),
        "num_reqs": 0 if table is None else min(table.shape[0], INT32_MAX),
        "context": 0 if table is None else min(table.shape[1], INT32_MAX),
        "num_parts": parts[0].shape[2] if parts else 1,
        "window_left": window_left,
        "score_scale": options.scale_products(options.find_scale(q.shape[-1])),
        "cap": options.cap,
        "inverse_k_scale": 1 / options.key_scale,
        "inverse_v_scale": 1 / options.value_scale,
        "value_scale": options.value_scale,
    }


def _merge(
    shape: DecodeShape,
    flags: DecodeFlags,
    keys: Keys,
    options: Options,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    parts: tuple[torch.Tensor, torch.Tensor],
    splits: int,
    window_left: int,
) -> None:
    """Join the parts of every request and head into out and lse."""
    config = merge_config(shape.value_dim)
    merge_splits_kernel[merge_grid(shape, config, out.shape[0])](
        *parts,
        keys.kv_indptr,
        options.sinks,
        out,
        lse,
        out.stride(0),
        out.stride(1),
        keys.dense_len,
        parts[0].shape[2],
        splits,
        window_left,
        options.value_scale,
        **merge_constexprs(shape, config, flags),
        **launch_options(config),
    )
