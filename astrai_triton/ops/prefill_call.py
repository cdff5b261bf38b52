"""One call of prefill attention: its arguments for the kernels, the launch of the tiles and the merge."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from astrai_triton.kernels.prefill import attend_prefill_kernel
from astrai_triton.kernels.split import merge_prefill_kernel
from astrai_triton.ops.check import check_device, check_float, check_shape
from astrai_triton.ops.launch import launch_options, on_device, row_alignment
from astrai_triton.ops.launch_prefill import (
    WINDOW_MAX,
    PrefillFlags,
    PrefillShape,
    merge_config,
    merge_constexprs,
    merge_grid,
    prefill_constexprs,
)
from astrai_triton.ops.options import INT32_MAX, Options
from astrai_triton.ops.prefill_plan import PrefillPlan


@attrs.frozen(eq=False, kw_only=True)
class Places:
    """Where rows of q and their keys lie: dense lengths, or the maps of a packed batch over a pool."""

    q_len: int = 0
    kv_len: int = 0
    req_to_token: torch.Tensor | None = None
    req_pool_indices: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    qo_indptr: torch.Tensor | None = None
    q_tile_to_batch: torch.Tensor | None = None
    q_tile_to_index: torch.Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether rows are packed; their keys are then paged."""
        return self.req_to_token is not None


def find_windows(options: Options) -> tuple[int, int]:
    """Keys to the left and to the right of a row's own that it sees; causal is none to the right."""
    left, right = (WINDOW_MAX if side < 0 else min(side, WINDOW_MAX) for side in options.window_size)
    return left, 0 if options.is_causal else right


def describe_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, out: torch.Tensor, *, is_packed: bool
) -> tuple[PrefillShape, PrefillFlags]:
    """What the variants of a call depend on, but for what the grid decides; the last two dimensions count."""
    shape = PrefillShape(
        q_dtype=q.dtype,
        kv_dtype=k.dtype,
        q_heads=q.shape[-2],
        kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        align=row_alignment(q, k, v, out),
    )
    left, right = find_windows(options)
    mask_dim = 0
    if options.mask is not None:
        # A packed mask is one of rows and keys.
        mask_dim = 3 if is_packed else options.mask.dim()
    flags = PrefillFlags(
        is_packed=is_packed,
        mask_dim=mask_dim,
        has_left=left < WINDOW_MAX,
        has_right=right < WINDOW_MAX,
        has_softcap=options.softcap > 0,
        sinks=options.sinks_dtype,
        has_lse=options.return_lse,
    )
    return shape, flags


def _take_parts(
    o_part: torch.Tensor | None, ml_part: torch.Tensor | None, rows: int, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller's scratch once checked, else new scratch."""
    q_heads, value_dim = out.shape[-2:]
    if o_part is None and ml_part is None:
        o_part = torch.empty((rows, q_heads, value_dim), dtype=torch.float32, device=out.device)
        return o_part, torch.empty((rows, q_heads, 2), dtype=torch.float32, device=out.device)
    if o_part is None or ml_part is None:
        missing = "o_part" if o_part is None else "ml_part"
        raise ValueError(f"{missing}: wanted together with its partner, got None; pass both or neither")
    for name, tensor, width in (("o_part", o_part, value_dim), ("ml_part", ml_part, 2)):
        check_float(name, tensor, (torch.float32,))
        check_shape(name, tensor, ("P", q_heads, width))
        check_device(name, tensor, out.device)
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: wanted it contiguous, got strides {tensor.stride()}; allocate it so")
        if tensor.shape[0] < rows:
            raise ValueError(f"{name}: wanted at least {rows} rows, got {tensor.shape[0]}; enlarge it")
    return o_part, ml_part


def launch_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    places: Places,
    options: Options,
    out: torch.Tensor,
    scratch: tuple[torch.Tensor | None, torch.Tensor | None],
    plan: PrefillPlan,
) -> torch.Tensor | None:
    """Run the tiles and, if a request may be split, the merge; q ``[B, Lq, Hq, D]``, B = 1 when packed."""
    grid, lse = plan.grid, None
    if options.return_lse:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    parts = _take_parts(*scratch, grid.part_rows, out) if grid.is_split else None
    if out.numel() == 0 or 0 in grid.shape:
        return lse
    with on_device(q):
        attend_prefill_kernel[grid.shape](
            **_tile_arguments(q, k, v, places, options, out, lse, parts),
            num_q_tiles=grid.num_q_tiles,
            max_places=grid.max_places,
            **prefill_constexprs(plan.shape, plan.config, plan.flags),
            **launch_options(plan.config),
        )
        if parts is not None:
            _merge(places, options, out, lse, parts, plan)
    return lse


def _tile_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    places: Places,
    options: Options,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    parts: tuple[torch.Tensor, torch.Tensor] | None,
) -> dict[str, Any]:
    """Run-time arguments of ``attend_prefill_kernel``; what a variant does not use is None or 0."""
    table, mask, (left, right) = places.req_to_token, options.mask, find_windows(options)
    scale = options.find_scale(q.shape[-1])
    mask_strides = (0, 0) if mask is None or places.is_packed else (*mask.stride()[:-1], 0)[:2]
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "req_to_token_ptr": table,
        "req_pool_indices_ptr": places.req_pool_indices,
        "kv_indptr_ptr": places.kv_indptr,
        "qo_indptr_ptr": places.qo_indptr,
        "q_tile_to_batch_ptr": places.q_tile_to_batch,
        "q_tile_to_index_ptr": places.q_tile_to_index,
        "mask_ptr": mask,
        "mask_indptr_ptr": options.mask_indptr,
        "sinks_ptr": options.sinks,
        "out_ptr": out,
        "lse_ptr": lse,
        "o_part_ptr": parts[0] if parts else None,
        "ml_part_ptr": parts[1] if parts else None,
        "q_stride_b": 0 if places.is_packed else q.stride(0),
        "q_stride_n": q.stride(1),
        "q_stride_h": q.stride(2),
        "k_stride_b": k.stride(0),
        "k_stride_n": k.stride(1),
        "k_stride_h": k.stride(2),
        "v_stride_b": v.stride(0),
        "v_stride_n": v.stride(1),
        "v_stride_h": v.stride(2),
        "table_stride_b": 0 if table is None else table.stride(0),
        "table_stride_n": 0 if table is None else table.stride(1),
        "mask_stride_b": mask_strides[0],
        "mask_stride_n": mask_strides[1],
        "out_stride_b": 0 if places.is_packed else out.stride(0),
        "out_stride_n": out.stride(1),
        "out_stride_h": out.stride(2),
        "group": q.shape[2] // k.shape[2],
        "dense_q_len": places.q_len,
        "dense_kv_len": places.kv_len,
        "num_slots": min(k.shape[1], INT32_MAX),
        "num_reqs": 0 if table is None else min(table.shape[0], INT32_MAX),
        "context": 0 if table is None else table.shape[1],
        "window_left": left,
        "window_right": right,
        # The kernel takes the maximum before it scales, so the sign goes with q.
        "score_scale": options.scale_products(abs(scale) or 1.0),
        "score_sign": float((scale > 0) - (scale < 0)),
        "cap": options.cap,
        "value_scale": options.value_scale,
    }


def _merge(
    places: Places,
    options: Options,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    parts: tuple[torch.Tensor, torch.Tensor],
    plan: PrefillPlan,
) -> None:
    """Join the parts of every request that was split into out and lse."""
    grid, config = plan.grid, merge_config()
    batch = out.shape[0] if places.req_pool_indices is None else places.req_pool_indices.shape[0]
    merge_prefill_kernel[merge_grid(config, grid, batch, plan.shape.q_heads)](
        *parts,
        places.qo_indptr,
        places.kv_indptr,
        options.sinks,
        out,
        lse,
        0 if places.is_packed else out.stride(0),
        out.stride(1),
        out.stride(2),
        places.q_len,
        places.kv_len,
        grid.max_places,
        grid.max_tiles,
        find_windows(options)[0],
        options.value_scale,
        **merge_constexprs(plan.shape, config, plan.flags),
        **launch_options(config),
    )
