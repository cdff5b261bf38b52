"""Tiles, splits and compiled variants of decode attention and of merging."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
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
from astrai_triton.schedule import decode_chunk

WINDOW_MAX = 2**31 - 1
"""A left window that reaches everything."""

FP_FUSION = True
"""Products and sums contract; said aloud, since the default differs between versions of Triton."""

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
    # float32 products have no matrix instruction: a thread holds what it multiplies.
    block_m = min(pad_block(group), 64) if q_itemsize < 4 else 16
    # fp8 is widened in registers: 64 keys of it spilled (Triton 3.6 and 3.9, sm_90, 2026-11-30).
    most_keys = 16 if q_itemsize == 4 else 32 if kv_itemsize == 1 else 64
    is_small = arch.shared_bytes < 128 * 1024
    tile_bytes = 16384 if is_small else 32768
    block_n = 1 << (tile_bytes // (columns * kv_itemsize)).bit_length() - 1
    # Four warps spilled with these: many rows of output, float32, and fp8 on sm_120 (3.9, 2026-11-30).
    has_wide_rows = block_m > 16 and block_m * columns > 4096
    # 64 keys of 8 warps spilled there on sm_100 alone (3.9, 2026-11-30).
    if has_wide_rows and arch.name == "sm_100":
        most_keys = min(most_keys, 32)
    return KernelConfig(
        block_m=block_m,
        block_n=max(16, min(block_n, most_keys)),
        num_warps=8 if has_wide_rows or q_itemsize == 4 or (is_small and kv_itemsize == 1) else 4,
        num_stages=3,
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


def decode_constexprs(shape: DecodeShape, config: KernelConfig, **flags: bool) -> dict[str, Any]:
    """Compile-time arguments of ``attend_decode_kernel``; ``flags`` are its IS_ and HAS_ ones."""
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
        **flags,
    }


def merge_constexprs(shape: DecodeShape, config: KernelConfig, **flags: bool) -> dict[str, Any]:
    """Compile-time arguments of ``merge_splits_kernel``; ``flags`` are its IS_ and HAS_ ones."""
    return {
        "VALUE_DIM": shape.value_dim,
        "CHUNK": shape.chunk,
        "BLOCK_S": config.block_m,
        "BLOCK_V": config.block_n,
        **flags,
    }


_FLAGS = ("IS_PAGED", "IS_SPLIT", "HAS_NEW", "HAS_MASK", "HAS_SOFTCAP", "HAS_SINKS", "HAS_LSE")

# Flags of the listed variants: what the engine launches, the plainest, and everything at once.
_FLAG_SETS = {
    "paged_split": ("IS_PAGED", "IS_SPLIT", "HAS_NEW"),
    "dense": (),
    "every_option": ("IS_PAGED", "HAS_NEW", "HAS_MASK", "HAS_SOFTCAP", "HAS_SINKS", "HAS_LSE"),
}

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

_OPTIONAL = {
    "new_k_ptr": "HAS_NEW",
    "new_v_ptr": "HAS_NEW",
    "req_to_token_ptr": "IS_PAGED",
    "req_pool_indices_ptr": "IS_PAGED",
    "kv_indptr_ptr": "IS_PAGED",
    "mask_ptr": "HAS_MASK",
    "sinks_ptr": "HAS_SINKS",
    "lse_ptr": "HAS_LSE",
    "o_part_ptr": "IS_SPLIT",
    "ml_part_ptr": "IS_SPLIT",
}


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
            for name, flags in _FLAG_SETS.items():
                if name != "every_option" or heads == _HEADS[0]:
                    variants.append(_decode_variant(arch, shape, name, frozenset(flags)))
            if q_dtype == kv_dtype:
                variants.append(_merge_variant(shape))
    variants += [_states_variant(dtype) for dtype in (torch.bfloat16, torch.float32)]
    return tuple(variants)


def _decode_variant(arch: Arch, shape: DecodeShape, kind: str, on: frozenset[str]) -> Variant:
    config = decode_config(
        arch, shape.head_dim, shape.value_dim, shape.group, shape.q_dtype.itemsize, shape.kv_dtype.itemsize
    )
    constexprs = decode_constexprs(shape, config, **{flag: flag in on for flag in _FLAGS})
    q_type, kv_type = TRITON_TYPES[shape.q_dtype], TRITON_TYPES[shape.kv_dtype]
    types = {"k_ptr": kv_type, "v_ptr": kv_type}
    return _build(
        f"decode_{kind}_h{shape.q_heads}_{shape.kv_heads}_d{shape.head_dim}_{shape.value_dim}_{q_type}"
        + (f"_{kv_type}" if kv_type != q_type else ""),
        attend_decode_kernel,
        types,
        q_type,
        constexprs,
        config,
        absent={name for name, flag in _OPTIONAL.items() if flag not in on}
        | ({"out_ptr", "lse_ptr", "sinks_ptr"} if "IS_SPLIT" in on else set()),
        uses_dot=shape.q_dtype != torch.float32,
        tile={
            "q_rows": config.block_m,
            "keys": config.block_n,
            "head_dim": shape.head_dim,
            "value_dim": shape.value_dim,
            "kv_itemsize": shape.kv_dtype.itemsize,
        },
    )


def _merge_variant(shape: DecodeShape) -> Variant:
    config = merge_config(shape.value_dim)
    constexprs = merge_constexprs(shape, config, IS_PAGED=True, HAS_SINKS=True, HAS_LSE=True)
    q_type = TRITON_TYPES[shape.q_dtype]
    return _build(
        f"merge_splits_h{shape.q_heads}_{shape.kv_heads}_d{shape.value_dim}_{q_type}",
        merge_splits_kernel,
        {},
        q_type,
        constexprs,
        config,
        absent=set(),
        uses_dot=False,
        tile={"splits": config.block_m, "value_dim": config.block_n},
    )


def _states_variant(dtype: torch.dtype) -> Variant:
    config = states_config(32, 128)
    return _build(
        f"merge_states_h32_d128_{TRITON_TYPES[dtype]}",
        merge_states_kernel,
        {"lse_a_ptr": "fp32", "lse_b_ptr": "fp32"},
        TRITON_TYPES[dtype],
        {"HEAD_DIM": 128, "ALIGN": 16, "BLOCK_H": config.block_m, "BLOCK_D": config.block_n},
        config,
        absent=set(),
        uses_dot=False,
        tile={"q_rows": config.block_m, "value_dim": config.block_n},
    )


_POINTER_TYPES = {
    "req_to_token_ptr": "i32",
    "req_pool_indices_ptr": "i32",
    "kv_indptr_ptr": "i32",
    "mask_ptr": "i1",
    "sinks_ptr": "fp32",
    "lse_ptr": "fp32",
    "o_part_ptr": "fp32",
    "ml_part_ptr": "fp32",
}
_FLOATS = ("score_scale", "cap", "inverse_k_scale", "inverse_v_scale", "value_scale")


def _build(
    name: str,
    kernel: Any,
    types: Mapping[str, str],
    q_type: str,
    constexprs: Mapping[str, Any],
    config: KernelConfig,
    *,
    absent: Set[str],
    uses_dot: bool,
    tile: Mapping[str, int],
) -> Variant:
    """``types`` are element types of pointers that are neither fixed nor of type ``q_type``."""
    signature, fixed = {}, {}
    for param in kernel.arg_names:
        if param in constexprs or param in absent:
            signature[param], fixed[param] = "constexpr", constexprs.get(param)
        elif param.endswith("_ptr"):
            signature[param] = "*" + {**_POINTER_TYPES, **types}.get(param, q_type)
        elif param in _FLOATS:
            signature[param] = "fp32"
        else:
            signature[param] = "i64" if "_stride_" in param else "i32"
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
