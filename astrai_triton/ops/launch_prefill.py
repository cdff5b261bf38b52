"""Tiles, splits and compiled variants of prefill attention."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import attrs
import torch

from astrai_triton.kernels.prefill import attend_prefill_kernel
from astrai_triton.kernels.split import merge_prefill_kernel
from astrai_triton.ops.launch import TRITON_TYPES, Arch, KernelConfig, Variant, dot_type, pad_block
from astrai_triton.schedule import Q_TILE

WINDOW_MAX = 2**30
"""A window side that reaches everything; positions plus it stay within int32."""

MIN_CHUNK = 2048
"""Fewest keys of a split: the partial states of 128 rows then stay below an eighth of its K and V."""

# Programs that a request alone should become: about one for each multiprocessor of a large GPU. The same
# everywhere, since a request's bits depend on how it is split.
_WANTED_PROGRAMS = 128
_PACKED_ROWS = 128

SHORT_LEN = 32
"""Rows of q per request up to which tiles are filled with heads rather than with positions."""

_MERGE_POSITIONS = 16


def prefill_config(
    arch: Arch, head_dim: int, value_dim: int, q_itemsize: int, *, mask_dim: int, has_left: bool
) -> KernelConfig:
    """Tile of the split-Q kernel.

    128 rows for 8 warps are two warp groups of wgmma with their accumulator in registers. What would spill
    has smaller tiles: at head_dim 128 half the keys without wgmma or for the edges of a window on the left;
    half the rows as well beyond head_dim 128, or for the addresses of a mask of rows and keys.
    """
    columns = max(pad_block(head_dim), pad_block(value_dim))
    if q_itemsize == 4:
        # float32 products have no matrix instruction: they take their operands from registers.
        block_m, block_n = (64, 32) if columns <= 64 else (32, 16)
        return KernelConfig(block_m=block_m, block_n=block_n, num_warps=8, num_stages=2)
    if columns > 128 or mask_dim == 3:
        return KernelConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)
    if columns == 128 and arch.capability >= 120:
        # The tile below spills 8 bytes with paged keys on sm_120, though not on sm_80 to sm_89.
        return KernelConfig(block_m=64, block_n=64, num_warps=8, num_stages=3)
    block_n = 32 if columns == 128 and (has_left or not arch.has_wgmma) else 64
    return KernelConfig(block_m=128, block_n=block_n, num_warps=8, num_stages=3)


def choose_heads(group: int, block_m: int, is_short: bool) -> int:
    """Heads of a group that share a tile, a power of two.

    Few positions: as many as the group has, so that rows are not left empty. Many: as many as waste no row,
    since fewer positions a tile also waste less of the diagonal.
    """
    most = min(block_m, 1 << (group - 1).bit_length())
    if is_short:
        return most
    while group % most:
        most //= 2
    return most


def count_places(q_heads: int, kv_heads: int) -> int:
    """q tiles times splits that a request may have where it is split. Of the shape alone."""
    group = q_heads // kv_heads
    return max(1, _WANTED_PROGRAMS // (kv_heads * -(-group * Q_TILE // _PACKED_ROWS)))


def count_splits(q_len: int, kv_len: int, window_left: int, max_places: int) -> int:
    """Splits of a request's keys: ``kernels.split.split_keys`` on the host."""
    origin = max(kv_len - q_len - window_left, 0) // MIN_CHUNK * MIN_CHUNK
    tiles = max(-(-q_len // Q_TILE), 1)
    return max(1, min(max_places // tiles, -(-(kv_len - origin) // MIN_CHUNK)))


@attrs.frozen(kw_only=True)
class Grid:
    """Programs of one call."""

    shape: tuple[int, int]
    num_q_tiles: int
    """Tiles of the map; of a dense request tiles times splits."""
    heads: int
    """Heads of a group in one tile."""
    max_places: int
    """q tiles times splits of a request that is split."""
    max_tiles: int
    """Most q tiles of a request that is split; 0 when none can be, and then there is no merge."""
    part_rows: int
    """Rows of scratch."""
    min_chunk: int
    """Fewest keys of a split."""


def dense_grid(
    config: KernelConfig, batch: int, q_len: int, kv_len: int, q_heads: int, kv_heads: int, window_left: int
) -> Grid:
    """Programs of a dense call: requests times splits times tiles, and shares of heads."""
    group = q_heads // kv_heads
    heads = choose_heads(group, config.block_m, q_len <= SHORT_LEN)
    tiles = -(-q_len * heads // config.block_m)
    places = count_places(q_heads, kv_heads)
    splits = count_splits(q_len, kv_len, window_left, places)
    is_split = splits > 1
    return Grid(
        shape=(batch * splits * tiles, kv_heads * -(-group // heads)),
        num_q_tiles=splits * tiles,
        heads=heads,
        max_places=places,
        max_tiles=-(-q_len // Q_TILE) if is_split else 0,
        part_rows=batch * places * Q_TILE if is_split else 0,
        min_chunk=MIN_CHUNK,
    )


def packed_grid(
    config: KernelConfig,
    batch: int,
    num_tokens: int,
    num_q_tiles: int,
    max_kv_len: int,
    q_heads: int,
    kv_heads: int,
) -> Grid:
    """Programs of a packed call: tiles of the map, then the places of every request for further splits.

    Which request is split stands on the device. Here is known only whether one can be: not if all keys fit
    into one split, nor if the only request has many rows.
    """
    group = q_heads // kv_heads
    heads = choose_heads(group, config.block_m, num_tokens <= batch * SHORT_LEN)
    parts = max(1, Q_TILE * heads // config.block_m)
    places = count_places(q_heads, kv_heads)
    fewest_rows = num_tokens if batch == 1 else 1
    is_split = count_splits(fewest_rows, max_kv_len, WINDOW_MAX, places) > 1
    entries = num_q_tiles + (batch * places if is_split else 0)
    return Grid(
        shape=(entries * parts, kv_heads * -(-group // heads)),
        num_q_tiles=num_q_tiles,
        heads=heads,
        max_places=places,
        max_tiles=places // 2 if is_split else 0,
        part_rows=batch * places * Q_TILE if is_split else 0,
        min_chunk=MIN_CHUNK,
    )


def merge_config() -> KernelConfig:
    """Positions that one program of the merge takes."""
    return KernelConfig(block_m=_MERGE_POSITIONS, block_n=1, num_warps=4, num_stages=2)


def prefill_constexprs(
    config: KernelConfig,
    *,
    q_dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    heads: int,
    align: int,
    min_chunk: int,
    mask_dim: int,
    **flags: bool,
) -> dict[str, Any]:
    """Compile-time arguments of ``attend_prefill_kernel``; ``flags`` are its IS_ and HAS_ ones."""
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "HEADS": heads,
        "Q_TILE": Q_TILE,
        "MIN_CHUNK": min_chunk,
        "ALIGN": align,
        "DOT": dot_type(q_dtype),
        "MASK_DIM": mask_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": pad_block(head_dim),
        "BLOCK_V": pad_block(value_dim),
        **flags,
    }


def merge_constexprs(
    config: KernelConfig, value_dim: int, align: int, min_chunk: int, **flags: bool
) -> dict[str, Any]:
    """Compile-time arguments of ``merge_prefill_kernel``; ``flags`` are its IS_ and HAS_ ones."""
    return {
        "VALUE_DIM": value_dim,
        "Q_TILE": Q_TILE,
        "MIN_CHUNK": min_chunk,
        "ALIGN": align,
        "BLOCK_M": config.block_m,
        "BLOCK_V": pad_block(value_dim),
        **flags,
    }


_FLAGS = (
    "IS_PACKED", "IS_PAGED", "IS_SPLIT", "HAS_LEFT", "HAS_RIGHT", "HAS_SOFTCAP", "HAS_SINKS", "HAS_LSE",
)  # fmt: skip
_PAGED = frozenset(("IS_PACKED", "IS_PAGED", "IS_SPLIT", "HAS_RIGHT"))
# What calls of each kind turn on, besides "MASK" for a mask of rows and keys.
_KINDS: Mapping[str, Set[str]] = {
    "dense_full": frozenset(),
    "dense_causal": frozenset(("HAS_RIGHT",)),
    "paged": _PAGED,
    "paged_whole": _PAGED - {"IS_SPLIT"},
    "paged_window": _PAGED | {"HAS_LEFT"},
    "every_option": _PAGED | {"MASK", "HAS_LEFT", "HAS_SOFTCAP", "HAS_SINKS", "HAS_LSE"},
}
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
# Query and KV heads, head_dim, dtypes of q and of K and V, and the kinds worth a report.
_LISTED: tuple[tuple[int, int, int, torch.dtype, torch.dtype, tuple[str, ...]], ...] = (
    (32, 8, 128, _BF16, _BF16, tuple(_KINDS)),
    (9, 3, 64, _BF16, _BF16, ("dense_causal", "paged", "paged_window")),
    (32, 8, 128, _FP16, _FP16, ("paged",)),
    (32, 32, 80, _BF16, _BF16, ("paged",)),
    (8, 4, 256, _BF16, _BF16, ("dense_causal", "paged")),
    (32, 8, 128, _FP32, _FP32, ("paged",)),
    (32, 8, 128, _BF16, torch.float8_e5m2, ("paged",)),
    (32, 8, 128, _BF16, torch.float8_e4m3fn, ("paged",)),
)


def list_variants(arch: Arch) -> tuple[Variant, ...]:
    """The prefill compilations that stand for all others: every kind of call, head_dim and dtype.

    Closed per head shape: batch, lengths, strides, groups and addresses are run-time values, so that a model
    uses a handful of variants, whatever its traffic.
    """
    variants = [
        _tile_variant(arch, q_heads // kv_heads, head_dim, (q_dtype, kv_dtype), kind)
        for q_heads, kv_heads, head_dim, q_dtype, kv_dtype, kinds in _LISTED
        for kind in kinds
        if kv_dtype != torch.float8_e4m3fn or arch.has_fp8
    ]
    return (*variants, *(_merge_variant(head_dim, _BF16) for head_dim in (64, 128, 256)))


def _tile_variant(
    arch: Arch, group: int, head_dim: int, dtypes: tuple[torch.dtype, torch.dtype], kind: str
) -> Variant:
    q_dtype, kv_dtype = dtypes
    on = _KINDS[kind]
    mask_dim = 3 if "MASK" in on else 0
    config = prefill_config(
        arch, head_dim, head_dim, q_dtype.itemsize, mask_dim=mask_dim, has_left="HAS_LEFT" in on
    )
    heads = choose_heads(group, config.block_m, is_short=False)
    constexprs = prefill_constexprs(
        config,
        q_dtype=q_dtype,
        head_dim=head_dim,
        value_dim=head_dim,
        heads=heads,
        align=16,
        min_chunk=MIN_CHUNK,
        mask_dim=mask_dim,
        **{flag: flag in on for flag in _FLAGS},
    )
    q_type, kv_type = TRITON_TYPES[q_dtype], TRITON_TYPES[kv_dtype]
    return _build(
        f"prefill_{kind}_g{group}_d{head_dim}_{q_type}" + (f"_{kv_type}" if kv_type != q_type else ""),
        attend_prefill_kernel,
        {"q_ptr": q_type, "out_ptr": q_type, "k_ptr": kv_type, "v_ptr": kv_type},
        constexprs,
        config,
        absent={name for name, flag in _OPTIONAL.items() if flag not in on},
        uses_dot=q_dtype != torch.float32,
        tile={
            "q_rows": config.block_m,
            "keys": config.block_n,
            "head_dim": head_dim,
            "value_dim": head_dim,
            "kv_itemsize": kv_dtype.itemsize,
        },
    )


def _merge_variant(value_dim: int, dtype: torch.dtype) -> Variant:
    config = merge_config()
    constexprs = merge_constexprs(
        config, value_dim, 16, MIN_CHUNK, IS_PACKED=True, HAS_SINKS=True, HAS_LSE=True
    )
    return _build(
        f"merge_prefill_d{value_dim}_{TRITON_TYPES[dtype]}",
        merge_prefill_kernel,
        {"out_ptr": TRITON_TYPES[dtype]},
        constexprs,
        config,
        absent=frozenset(),
        uses_dot=False,
        tile={"q_rows": config.block_m, "value_dim": value_dim},
    )


# Pointers that are None unless the flag is on.
_OPTIONAL = {
    "req_to_token_ptr": "IS_PAGED",
    "req_pool_indices_ptr": "IS_PAGED",
    "kv_indptr_ptr": "IS_PACKED",
    "qo_indptr_ptr": "IS_PACKED",
    "q_tile_to_batch_ptr": "IS_PACKED",
    "q_tile_to_index_ptr": "IS_PACKED",
    "mask_ptr": "MASK",
    "mask_indptr_ptr": "MASK",
    "sinks_ptr": "HAS_SINKS",
    "lse_ptr": "HAS_LSE",
    "o_part_ptr": "IS_SPLIT",
    "ml_part_ptr": "IS_SPLIT",
}
_TYPES = {
    "mask_ptr": "*i1",
    "mask_indptr_ptr": "*i64",
    "sinks_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "o_part_ptr": "*fp32",
    "ml_part_ptr": "*fp32",
    "score_scale": "fp32",
    "score_sign": "fp32",
    "cap": "fp32",
    "value_scale": "fp32",
}


def _build(
    name: str,
    kernel: Any,
    element_types: Mapping[str, str],
    constexprs: Mapping[str, Any],
    config: KernelConfig,
    *,
    absent: Set[str],
    uses_dot: bool,
    tile: Mapping[str, int],
) -> Variant:
    signature: dict[str, str] = {}
    for param in kernel.arg_names:
        if param in constexprs or param in absent:
            signature[param] = "constexpr"
        elif param in element_types:
            signature[param] = "*" + element_types[param]
        elif param in _TYPES:
            signature[param] = _TYPES[param]
        else:
            signature[param] = "*i32" if param.endswith("_ptr") else "i64" if "_stride_" in param else "i32"
    fixed = {param: constexprs.get(param) for param, spelled in signature.items() if spelled == "constexpr"}
    return Variant(
        name=name,
        kernel=kernel,
        signature=signature,
        constexprs=fixed,
        divisible=(),
        config=config,
        uses_dot=uses_dot,
        tile=tile,
    )
