"""One call of prefill attention: its arguments for the kernels, the launch of the tiles and the merge."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch

from astrai_triton.kernels.prefill import attend_prefill_kernel
from astrai_triton.kernels.split import merge_prefill_kernel
from astrai_triton.ops.check import check_device, check_float, check_shape
from astrai_triton.ops.launch import Arch, KernelConfig, on_device, row_alignment
from astrai_triton.ops.launch_prefill import (
    WINDOW_MAX,
    Grid,
    merge_config,
    merge_constexprs,
    prefill_config,
    prefill_constexprs,
)
from astrai_triton.schedule import Q_TILE

_LOG2_E = 1 / math.log(2)
_INT32_MAX = 2**31 - 1


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


@attrs.frozen(eq=False, kw_only=True)
class Options:
    """Everything else a call may say."""

    mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None = None
    is_causal: bool
    softmax_scale: float | None
    window_size: tuple[int, int]
    softcap: float
    sinks: torch.Tensor | None
    k_scale: float | None
    v_scale: float | None
    return_lse: bool

    @property
    def windows(self) -> tuple[int, int]:
        """Keys to the left and to the right of a row's own that it sees; causal is none to the right."""
        left, right = (WINDOW_MAX if side < 0 else min(side, WINDOW_MAX) for side in self.window_size)
        return left, 0 if self.is_causal else right

    @property
    def mask_dim(self) -> int:
        """Dimensions of the mask, 0 without one; a packed mask is one of rows and keys."""
        if self.mask is None:
            return 0
        return 3 if self.mask_indptr is not None else self.mask.dim()

    @property
    def value_scale(self) -> float:
        """What V is to be multiplied by."""
        return 1.0 if self.v_scale is None else float(self.v_scale)


def choose_config(q: torch.Tensor, v: torch.Tensor, options: Options, arch: Arch) -> KernelConfig:
    """The tile for a call."""
    return prefill_config(
        arch,
        q.shape[-1],
        v.shape[-1],
        q.element_size(),
        mask_dim=options.mask_dim,
        has_left=options.windows[0] < WINDOW_MAX,
    )


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
    config: KernelConfig,
    grid: Grid,
) -> torch.Tensor | None:
    """Run the tiles and, if a request may be split, the merge; q ``[B, Lq, Hq, D]``, B = 1 when packed."""
    lse = None
    if options.return_lse:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    parts = _take_parts(*scratch, grid.part_rows, out) if grid.part_rows else None
    if out.numel() == 0 or 0 in grid.shape:
        return lse
    left, right = options.windows
    align = row_alignment(q, k, v, out)
    constexprs = prefill_constexprs(
        config,
        q_dtype=q.dtype,
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        heads=grid.heads,
        align=align,
        min_chunk=grid.min_chunk,
        mask_dim=options.mask_dim,
        IS_PACKED=places.is_packed,
        IS_PAGED=places.is_packed,
        IS_SPLIT=parts is not None,
        HAS_LEFT=left < WINDOW_MAX,
        HAS_RIGHT=right < WINDOW_MAX,
        HAS_SOFTCAP=options.softcap > 0,
        HAS_SINKS=options.sinks is not None,
        HAS_LSE=lse is not None,
    )
    with on_device(q):
        attend_prefill_kernel[grid.shape](
            **_tile_arguments(q, k, v, places, options, out, lse, parts),
            num_q_tiles=grid.num_q_tiles,
            max_places=grid.max_places,
            **constexprs,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )
        if parts is not None:
            _merge(places, options, out, lse, parts, grid, align)
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
    table, mask, (left, right) = places.req_to_token, options.mask, options.windows
    scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    k_scale = 1.0 if options.k_scale is None else options.k_scale
    to_scores = 1 / options.softcap if options.softcap else _LOG2_E
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
        "num_slots": min(k.shape[1], _INT32_MAX),
        "num_reqs": 0 if table is None else table.shape[0],
        "context": 0 if table is None else table.shape[1],
        "window_left": left,
        "window_right": right,
        # The kernel takes the maximum before it scales, so the sign goes with q.
        "score_scale": (abs(scale) or 1.0) * k_scale * to_scores,
        "score_sign": float((scale > 0) - (scale < 0)),
        "cap": options.softcap * _LOG2_E,
        "value_scale": options.value_scale,
    }


def _merge(
    places: Places,
    options: Options,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    parts: tuple[torch.Tensor, torch.Tensor],
    grid: Grid,
    align: int,
) -> None:
    """Join the parts of every request that was split into out and lse."""
    q_heads, value_dim = out.shape[-2:]
    config = merge_config()
    constexprs = merge_constexprs(
        config,
        value_dim,
        align,
        grid.min_chunk,
        IS_PACKED=places.is_packed,
        HAS_SINKS=options.sinks is not None,
        HAS_LSE=lse is not None,
    )
    batch = out.shape[0] if places.req_pool_indices is None else places.req_pool_indices.shape[0]
    merge_prefill_kernel[(batch * grid.max_tiles * (Q_TILE // config.block_m), q_heads)](
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
        options.windows[0],
        options.value_scale,
        **constexprs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
