"""Tiles, splits and compiled variants of prefill attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from astrai_triton.kernels.prefill import attend_prefill_kernel
from astrai_triton.kernels.split import merge_prefill_kernel
from astrai_triton.ops.launch import Arch, KernelConfig, Variant, dot_type, pad_block
from astrai_triton.ops.variant import describe_variant, name_dtypes, name_flags
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
class PrefillShape:
    """What a variant of the split-Q kernel depends on, besides its flags."""

    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    align: int = 16
    """Of row starts, in bytes; see ``row_alignment``."""

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads


@attrs.frozen(kw_only=True)
class PrefillFlags:
    """What a call asks for, as far as a variant depends on it; by default the plainest."""

    is_packed: bool = False
    """Rows are packed and their keys paged."""
    is_short: bool = False
    """Tiles are filled with heads rather than with positions; of the grid."""
    is_split: bool = False
    """A request may be split along its keys; of the grid."""
    mask_dim: int = 0
    """0 without a mask; 2 for one of keys, 3 for one of rows and keys."""
    has_left: bool = False
    """The window ends on the left."""
    has_right: bool = False
    """The window ends on the right; causal is one that does at 0."""
    has_softcap: bool = False
    sinks: torch.dtype | None = None
    """Element type of the sinks, None without them."""
    has_lse: bool = False


def choose_config(arch: Arch, shape: PrefillShape, flags: PrefillFlags) -> KernelConfig:
    """The tile of a call; it does not depend on the flags that are of the grid."""
    return prefill_config(
        arch,
        shape.head_dim,
        shape.value_dim,
        shape.q_dtype.itemsize,
        mask_dim=flags.mask_dim,
        has_left=flags.has_left,
    )


@attrs.frozen(kw_only=True)
class Grid:
    """Programs of one call."""

    shape: tuple[int, int]
    num_q_tiles: int
    """Tiles of the map; of a dense request tiles times splits."""
    is_short: bool
    """Tiles are filled with heads rather than with positions."""
    max_places: int
    """q tiles times splits of a request that is split."""
    max_tiles: int
    """Most q tiles of a request that is split; 0 when none can be, and then there is no merge."""
    part_rows: int
    """Rows of scratch."""

    @property
    def is_split(self) -> bool:
        """Whether a request may be split along its keys."""
        return self.max_tiles > 0


def dense_grid(
    config: KernelConfig, batch: int, q_len: int, kv_len: int, q_heads: int, kv_heads: int, window_left: int
) -> Grid:
    """Programs of a dense call: requests times splits times tiles, and shares of heads."""
    group = q_heads // kv_heads
    is_short = q_len <= SHORT_LEN
    heads = choose_heads(group, config.block_m, is_short)
    tiles = -(-q_len * heads // config.block_m)
    places = count_places(q_heads, kv_heads)
    splits = count_splits(q_len, kv_len, window_left, places)
    is_split = splits > 1
    return Grid(
        shape=(batch * splits * tiles, kv_heads * -(-group // heads)),
        num_q_tiles=splits * tiles,
        is_short=is_short,
        max_places=places,
        max_tiles=-(-q_len // Q_TILE) if is_split else 0,
        part_rows=batch * places * Q_TILE if is_split else 0,
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
    is_short = num_tokens <= batch * SHORT_LEN
    heads = choose_heads(group, config.block_m, is_short)
    parts = max(1, Q_TILE * heads // config.block_m)
    places = count_places(q_heads, kv_heads)
    fewest_rows = num_tokens if batch == 1 else 1
    is_split = count_splits(fewest_rows, max_kv_len, WINDOW_MAX, places) > 1
    entries = num_q_tiles + (batch * places if is_split else 0)
    return Grid(
        shape=(entries * parts, kv_heads * -(-group // heads)),
        num_q_tiles=num_q_tiles,
        is_short=is_short,
        max_places=places,
        max_tiles=places // 2 if is_split else 0,
        part_rows=batch * places * Q_TILE if is_split else 0,
    )


def merge_config() -> KernelConfig:
    """Positions that one program of the merge takes."""
    return KernelConfig(block_m=_MERGE_POSITIONS, block_n=1, num_warps=4, num_stages=2)


def merge_grid(config: KernelConfig, grid: Grid, batch: int, q_heads: int) -> tuple[int, int]:
    """Programs of ``merge_prefill_kernel``: blocks of positions of requests that may be split, and heads."""
    return batch * grid.max_tiles * (Q_TILE // config.block_m), q_heads


def prefill_constexprs(shape: PrefillShape, config: KernelConfig, flags: PrefillFlags) -> dict[str, Any]:
    """Compile-time arguments of ``attend_prefill_kernel``."""
    return {
        "HEAD_DIM": shape.head_dim,
        "VALUE_DIM": shape.value_dim,
        "HEADS": choose_heads(shape.group, config.block_m, flags.is_short),
        "Q_TILE": Q_TILE,
        "MIN_CHUNK": MIN_CHUNK,
        "ALIGN": shape.align,
        "DOT": dot_type(shape.q_dtype),
        "MASK_DIM": flags.mask_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": pad_block(shape.head_dim),
        "BLOCK_V": pad_block(shape.value_dim),
        "IS_PACKED": flags.is_packed,
        "IS_PAGED": flags.is_packed,
        "IS_SPLIT": flags.is_split,
        "HAS_LEFT": flags.has_left,
        "HAS_RIGHT": flags.has_right,
        "HAS_SOFTCAP": flags.has_softcap,
        "HAS_SINKS": flags.sinks is not None,
        "HAS_LSE": flags.has_lse,
    }


def merge_constexprs(shape: PrefillShape, config: KernelConfig, flags: PrefillFlags) -> dict[str, Any]:
    """Compile-time arguments of ``merge_prefill_kernel``."""
    return {
        "VALUE_DIM": shape.value_dim,
        "Q_TILE": Q_TILE,
        "MIN_CHUNK": MIN_CHUNK,
        "ALIGN": shape.align,
        "BLOCK_M": config.block_m,
        "BLOCK_V": pad_block(shape.value_dim),
        "IS_PACKED": flags.is_packed,
        "HAS_SINKS": flags.sinks is not None,
        "HAS_LSE": flags.has_lse,
    }


def build_variants(arch: Arch, shape: PrefillShape, flags: PrefillFlags) -> tuple[Variant, ...]:
    """What a call compiles, in the order of its launches: the tiles, and the merge if it may be split."""
    tiles = _tile_variant(arch, shape, flags)
    return (tiles, _merge_variant(shape, flags)) if flags.is_split else (tiles,)


_PAGED = PrefillFlags(is_packed=True, is_split=True, has_right=True)
_KINDS: Mapping[str, PrefillFlags] = {
    "dense_full": PrefillFlags(),
    "dense_causal": PrefillFlags(has_right=True),
    "paged": _PAGED,
    "paged_short": attrs.evolve(_PAGED, is_short=True),
    "paged_whole": attrs.evolve(_PAGED, is_split=False),
    "paged_window": attrs.evolve(_PAGED, has_left=True),
    "every_option": attrs.evolve(
        _PAGED, mask_dim=3, has_left=True, has_softcap=True, sinks=torch.float32, has_lse=True
    ),
}
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
# Query and KV heads, head_dim, dtypes of q and of K and V, and the kinds worth a report. Short rows make no
# variant of their own where the group is a power of two.
_LISTED: tuple[tuple[int, int, int, torch.dtype, torch.dtype, tuple[str, ...]], ...] = (
    (32, 8, 128, _BF16, _BF16, tuple(kind for kind in _KINDS if kind != "paged_short")),
    (9, 3, 64, _BF16, _BF16, ("dense_causal", "paged", "paged_short", "paged_window")),
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
    variants, merges = [], {}
    for q_heads, kv_heads, head_dim, q_dtype, kv_dtype, kinds in _LISTED:
        if kv_dtype == torch.float8_e4m3fn and not arch.has_fp8:
            continue
        shape = PrefillShape(
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
        )
        for kind in kinds:
            variants.append(_tile_variant(arch, shape, _KINDS[kind]))
            if q_dtype == _BF16 and kind in ("paged", "every_option"):
                merge = _merge_variant(shape, _KINDS[kind])
                merges[merge.name] = merge
    return (*variants, *merges.values())


def _tile_variant(arch: Arch, shape: PrefillShape, flags: PrefillFlags) -> Variant:
    config = choose_config(arch, shape, flags)
    pointers = {
        **dict.fromkeys(("q_ptr", "out_ptr"), shape.q_dtype),
        **dict.fromkeys(("k_ptr", "v_ptr"), shape.kv_dtype),
        "sinks_ptr": flags.sinks,
    }
    is_present = {
        "req_to_token_ptr": flags.is_packed,
        "req_pool_indices_ptr": flags.is_packed,
        "kv_indptr_ptr": flags.is_packed,
        "qo_indptr_ptr": flags.is_packed,
        "q_tile_to_batch_ptr": flags.is_packed,
        "q_tile_to_index_ptr": flags.is_packed,
        "mask_ptr": flags.mask_dim > 0,
        "mask_indptr_ptr": flags.mask_dim > 0 and flags.is_packed,
        "lse_ptr": flags.has_lse,
        "o_part_ptr": flags.is_split,
        "ml_part_ptr": flags.is_split,
    }
    return describe_variant(
        _name_tiles(shape, flags),
        attend_prefill_kernel,
        prefill_constexprs(shape, config, flags),
        config,
        pointers=pointers,
        absent={name for name, is_here in is_present.items() if not is_here},
        uses_dot=shape.q_dtype != torch.float32,
        tile={
            "q_rows": config.block_m,
            "keys": config.block_n,
            "head_dim": shape.head_dim,
            "value_dim": shape.value_dim,
            "kv_itemsize": shape.kv_dtype.itemsize,
        },
    )


def _merge_variant(shape: PrefillShape, flags: PrefillFlags) -> Variant:
    config = merge_config()
    is_present = {
        "qo_indptr_ptr": flags.is_packed,
        "kv_indptr_ptr": flags.is_packed,
        "lse_ptr": flags.has_lse,
    }
    kind = name_flags("paged" if flags.is_packed else "dense", {"lse": flags.has_lse}, flags.sinks)
    return describe_variant(
        f"merge_prefill_{kind}_d{shape.value_dim}_{name_dtypes(shape.q_dtype, shape.q_dtype, shape.align)}",
        merge_prefill_kernel,
        merge_constexprs(shape, config, flags),
        config,
        pointers={"out_ptr": shape.q_dtype, "sinks_ptr": flags.sinks},
        absent={name for name, is_here in is_present.items() if not is_here},
        tile={"q_rows": config.block_m, "value_dim": shape.value_dim},
    )


def _name_tiles(shape: PrefillShape, flags: PrefillFlags) -> str:
    on = {
        "full": not flags.has_right,
        "right": flags.has_right,
        "left": flags.has_left,
        "split": flags.is_split,
        "short": flags.is_short,
        f"mask{flags.mask_dim}": flags.mask_dim > 0,
        "softcap": flags.has_softcap,
        "lse": flags.has_lse,
    }
    kinds = [kind for kind, asked in _KINDS.items() if asked == flags]
    kind = kinds[0] if kinds else name_flags("paged" if flags.is_packed else "dense", on, flags.sinks)
    sizes = f"d{shape.head_dim}" + (f"_{shape.value_dim}" if shape.value_dim != shape.head_dim else "")
    dtypes = name_dtypes(shape.q_dtype, shape.kv_dtype, shape.align)
    return f"prefill_{kind}_g{shape.group}_{sizes}_{dtypes}"
