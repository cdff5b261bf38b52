"""Tiles, splits and compiled variants of decode attention and of merging."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from astrai_triton.kernels.decode import attend_decode_kernel
from astrai_triton.kernels.merge import merge_splits_kernel, merge_states_kernel
from astrai_triton.ops.launch import (
    FP8_DTYPES,
    TRITON_TYPES,
    Arch,
    KernelConfig,
    Variant,
    dot_type,
    pad_block,
)
from astrai_triton.ops.variant import describe_variant, name_dtypes, name_flags
from astrai_triton.schedule import decode_chunk

WINDOW_MAX = 2**31 - 1
"""A left window that reaches everything."""

_MERGE_SPLITS, _MERGE_COLUMNS = 32, 64


@functools.cache
def decode_config(
    arch: Arch, head_dim: int, value_dim: int, group: int, q_itemsize: int, kv_itemsize: int
) -> KernelConfig:
    """Tile of the split-KV kernel.

    Decode is bound by memory: what counts is bytes on their way. A tile of K and V has at most 32 KB (16 KB
    where a CTA may have 99 KB), and two of them are on their way while a third is computed, so that the CTAs
    that share a multiprocessor have more than 32 KB in flight.
    """
    columns = pad_block(head_dim) + pad_block(value_dim)
    is_small = arch.shared_bytes < 128 * 1024
    # float32 products have no matrix instruction: a thread holds what it multiplies.
    block_m = min(pad_block(group), 64) if q_itemsize < 4 else 16
    # 64 rows over fp8 spilled 8 bytes on sm_120 (Triton 3.6, 2026-11-30).
    if is_small and kv_itemsize == 1:
        block_m = min(block_m, 32)
    # fp8 is widened in registers: 64 keys of it spilled (Triton 3.6 and 3.9, sm_90, 2026-11-30).
    most_keys = 16 if q_itemsize == 4 else 32 if kv_itemsize == 1 else 64
    tile_bytes = 16384 if is_small else 32768
    block_n = 1 << (tile_bytes // (columns * kv_itemsize)).bit_length() - 1
    has_wide_rows = block_m > 16 and block_m * columns > 4096
    # 64 keys of 8 warps spilled there on sm_100 alone (3.9, 2026-11-30).
    if has_wide_rows and arch.name == "sm_100":
        most_keys = min(most_keys, 32)
    # Four warps spilled with many rows of output, with float32 (sm_90 on 3.6; padded heads on sm_120) and
    # with fp8 on sm_120; eight with float32 beyond 256 columns (sm_80), and where a CTA may have 99 KB with
    # other float32 and padded fp8 (3.9, 2026-11-30).
    is_padded = pad_block(head_dim) > head_dim
    is_float = q_itemsize == 4 and columns < 512 and (is_padded or not is_small)
    is_fp8 = kv_itemsize == 1 and is_small and not is_padded
    return KernelConfig(
        block_m=block_m,
        block_n=max(16, min(block_n, most_keys)),
        num_warps=8 if has_wide_rows or is_float or is_fp8 else 4,
        # One CTA a multiprocessor, and a tile of fp8 has half the bytes.
        num_stages=5 if has_wide_rows and kv_itemsize == 1 else 3,
    )


def merge_config(value_dim: int) -> KernelConfig:
    """Splits and columns that one program of the merge takes at a time; of the shape alone."""
    return KernelConfig(
        block_m=_MERGE_SPLITS, block_n=min(_MERGE_COLUMNS, pad_block(value_dim)), num_warps=4, num_stages=2
    )


def states_config(q_heads: int, head_dim: int) -> KernelConfig:
    """Heads and columns of one program that joins two states: about 2048 elements."""
    block_n = pad_block(head_dim)
    block_m = max(1, min(pad_block(q_heads, 1), 2048 // block_n))
    return KernelConfig(block_m=block_m, block_n=block_n, num_warps=4, num_stages=1)


def cover_splits(max_kv_len: int, chunk: int, window_left: int) -> int:
    """Splits to launch so that every request of at most ``max_kv_len`` keys is covered, at least one."""
    # A window of w keys touches at most this many chunks, wherever it lies.
    keys = max(1, min(max_kv_len, window_left + 1))
    touched = (keys + chunk - 2) // chunk + 1
    return max(1, min(-(-max_kv_len // chunk), touched))


@attrs.frozen(kw_only=True)
class DecodeShape:
    """What a variant of the split-KV kernel depends on, besides its flags."""

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

    @property
    def chunk(self) -> int:
        """Keys of a split."""
        return decode_chunk(self.q_heads, self.kv_heads, self.kv_dtype.itemsize)


@attrs.frozen(kw_only=True)
class DecodeFlags:
    """What a call asks for, as far as a variant depends on it; by default the plainest."""

    is_paged: bool = False
    is_split: bool = False
    """More than one split is launched; sinks and lse are then matters of the merge."""
    has_new: bool = False
    """K and V of the last position are appended."""
    has_mask: bool = False
    has_softcap: bool = False
    sinks: torch.dtype | None = None
    """Element type of the sinks, None without them."""
    has_lse: bool = False


def decode_constexprs(shape: DecodeShape, config: KernelConfig, flags: DecodeFlags) -> dict[str, Any]:
    """Compile-time arguments of ``attend_decode_kernel``."""
    return {
        "GROUP": shape.group,
        "GROUP_TILES": -(-shape.group // config.block_m),
        "HEAD_DIM": shape.head_dim,
        "VALUE_DIM": shape.value_dim,
        "CHUNK": shape.chunk,
        "ALIGN": shape.align,
        "DOT": dot_type(shape.q_dtype),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": pad_block(shape.head_dim),
        "BLOCK_V": pad_block(shape.value_dim),
        "IS_PAGED": flags.is_paged,
        "IS_SPLIT": flags.is_split,
        "HAS_NEW": flags.has_new,
        "HAS_MASK": flags.has_mask,
        "HAS_SOFTCAP": flags.has_softcap,
        "HAS_SINKS": flags.sinks is not None and not flags.is_split,
        "HAS_LSE": flags.has_lse and not flags.is_split,
    }


def merge_constexprs(shape: DecodeShape, config: KernelConfig, flags: DecodeFlags) -> dict[str, Any]:
    """Compile-time arguments of ``merge_splits_kernel``."""
    return {
        "VALUE_DIM": shape.value_dim,
        "CHUNK": shape.chunk,
        "BLOCK_S": config.block_m,
        "BLOCK_V": config.block_n,
        "IS_PAGED": flags.is_paged,
        "HAS_SINKS": flags.sinks is not None,
        "HAS_LSE": flags.has_lse,
    }


def states_constexprs(head_dim: int, align: int, config: KernelConfig) -> dict[str, Any]:
    """Compile-time arguments of ``merge_states_kernel``."""
    return {"HEAD_DIM": head_dim, "ALIGN": align, "BLOCK_H": config.block_m, "BLOCK_D": config.block_n}


def decode_grid(shape: DecodeShape, config: KernelConfig, batch: int, splits: int) -> tuple[int, int, int]:
    """Programs of ``attend_decode_kernel``: requests, tiles of heads, splits."""
    return batch, shape.kv_heads * -(-shape.group // config.block_m), splits


def merge_grid(shape: DecodeShape, config: KernelConfig, batch: int) -> tuple[int, int, int]:
    """Programs of ``merge_splits_kernel``: requests, heads, blocks of columns."""
    return batch, shape.q_heads, -(-shape.value_dim // config.block_n)


def build_variants(arch: Arch, shape: DecodeShape, flags: DecodeFlags) -> tuple[Variant, ...]:
    """What a call compiles, in the order of its launches: the splits, and the merge of several."""
    splits = _split_variant(arch, shape, flags)
    return (splits, _merge_variant(shape, flags)) if flags.is_split else (splits,)


# What is worth a report: what the engine launches for long and for short contexts, the plainest call, and
# everything at once.
_KINDS: Mapping[str, DecodeFlags] = {
    "paged_split": DecodeFlags(is_paged=True, is_split=True, has_new=True),
    "paged": DecodeFlags(is_paged=True, has_new=True),
    "dense": DecodeFlags(),
    "every_option": DecodeFlags(
        is_paged=True, has_new=True, has_mask=True, has_softcap=True, sinks=torch.float32, has_lse=True
    ),
}
# Of one head shape each, as they differ from "paged_split" by what they leave out, or by much at once.
_LISTED_ONCE = ("paged", "every_option")
# A merge knows of pages, sinks and lse alone.
_MERGED = ("paged_split", "every_option")

# Head shapes of models in use: q heads, kv heads, head_dim, value_dim.
_HEADS = (
    (32, 8, 128, 128),  # Llama 3, Qwen 3, Mistral
    (9, 3, 64, 64),  # SmolLM2 135M
    (8, 4, 256, 256),  # Gemma
    (32, 32, 80, 80),  # Phi 2
    (32, 32, 96, 96),  # Phi 3 mini
    (40, 2, 128, 128),  # a group of 20
    (128, 1, 192, 128),  # one KV head for all
)


def list_variants(arch: Arch) -> tuple[Variant, ...]:
    """Compilations of the decode and merge kernels for the head shapes of models in use, aligned rows.

    Closed per ``DecodeShape``: batch, lengths, splits, window, strides, addresses and scales are run-time
    values, so that a model uses one variant per set of flags it asks for.
    """
    pairs = [(dtype, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    # What the architecture cannot convert is refused by the ops.
    pairs += [(torch.bfloat16, dtype) for dtype in FP8_DTYPES if arch.has_fp8 or dtype == torch.float8_e5m2]
    variants = []
    for heads in _HEADS:
        for q_dtype, kv_dtype in pairs:
            shape = DecodeShape(
                q_dtype=q_dtype,
                kv_dtype=kv_dtype,
                q_heads=heads[0],
                kv_heads=heads[1],
                head_dim=heads[2],
                value_dim=heads[3],
            )
            kinds = [kind for kind in _KINDS if kind not in _LISTED_ONCE or heads == _HEADS[0]]
            variants += [_split_variant(arch, shape, _KINDS[kind]) for kind in kinds]
            if q_dtype == kv_dtype:
                variants += [_merge_variant(shape, _KINDS[kind]) for kind in kinds if kind in _MERGED]
    variants += [_states_variant(dtype) for dtype in (torch.bfloat16, torch.float32)]
    return tuple(variants)


def _split_variant(arch: Arch, shape: DecodeShape, flags: DecodeFlags) -> Variant:
    config = decode_config(
        arch, shape.head_dim, shape.value_dim, shape.group, shape.q_dtype.itemsize, shape.kv_dtype.itemsize
    )
    pointers = {
        **dict.fromkeys(("q_ptr", "new_k_ptr", "new_v_ptr", "out_ptr"), shape.q_dtype),
        **dict.fromkeys(("k_ptr", "v_ptr"), shape.kv_dtype),
        "sinks_ptr": None if flags.is_split else flags.sinks,
    }
    is_present = {
        "new_k_ptr": flags.has_new,
        "new_v_ptr": flags.has_new,
        "req_to_token_ptr": flags.is_paged,
        "req_pool_indices_ptr": flags.is_paged,
        "kv_indptr_ptr": flags.is_paged,
        "mask_ptr": flags.has_mask,
        "out_ptr": not flags.is_split,
        "lse_ptr": flags.has_lse and not flags.is_split,
        "o_part_ptr": flags.is_split,
        "ml_part_ptr": flags.is_split,
    }
    return describe_variant(
        _name_splits(shape, flags),
        attend_decode_kernel,
        decode_constexprs(shape, config, flags),
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


def _merge_variant(shape: DecodeShape, flags: DecodeFlags) -> Variant:
    config = merge_config(shape.value_dim)
    is_present = {
        "kv_indptr_ptr": flags.is_paged,
        "lse_ptr": flags.has_lse,
    }
    kind = name_flags("paged" if flags.is_paged else "dense", {"lse": flags.has_lse}, flags.sinks)
    heads = f"h{shape.q_heads}_{shape.kv_heads}_d{shape.value_dim}"
    return describe_variant(
        f"merge_splits_{kind}_{heads}_{TRITON_TYPES[shape.q_dtype]}",
        merge_splits_kernel,
        merge_constexprs(shape, config, flags),
        config,
        pointers={"out_ptr": shape.q_dtype, "sinks_ptr": flags.sinks},
        absent={name for name, is_here in is_present.items() if not is_here},
        tile={"splits": config.block_m, "value_dim": config.block_n},
    )


def _states_variant(dtype: torch.dtype) -> Variant:
    config = states_config(32, 128)
    return describe_variant(
        f"merge_states_h32_d128_{TRITON_TYPES[dtype]}",
        merge_states_kernel,
        states_constexprs(128, 16, config),
        config,
        pointers=dict.fromkeys(("o_a_ptr", "o_b_ptr", "out_ptr"), dtype),
        tile={"q_rows": config.block_m, "value_dim": config.block_n},
    )


def _name_splits(shape: DecodeShape, flags: DecodeFlags) -> str:
    place = "dense" if not flags.is_paged else "paged" if flags.has_new else "paged_written"
    on = {
        "split": flags.is_split,
        "mask": flags.has_mask,
        "softcap": flags.has_softcap,
        "lse": flags.has_lse,
    }
    kinds = [kind for kind, asked in _KINDS.items() if asked == flags]
    kind = kinds[0] if kinds else name_flags(place, on, flags.sinks)
    heads = f"h{shape.q_heads}_{shape.kv_heads}_d{shape.head_dim}_{shape.value_dim}"
    return f"decode_{kind}_{heads}_{name_dtypes(shape.q_dtype, shape.kv_dtype, shape.align)}"
