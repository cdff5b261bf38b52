"""Tiles of the rotary kernels as pure functions of the head shapes, and every variant there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from astrai_triton.kernels.append import append_rotated_kernel
from astrai_triton.kernels.rotary import rotate_qk_kernel
from astrai_triton.ops.launch import FP8_DTYPES, TRITON_TYPES, Arch, KernelConfig, Variant, pad_block
from astrai_triton.ops.variant import describe_variant

FP_FUSION = False
"""A product and a sum stay two roundings: memory-bound anyway, and the bits are those of the interpreter."""

# Elements of a program: 16 or more a thread are two wide loads under way; one warp of them is the least.
_MOST_ELEMENTS, _LEAST_ELEMENTS, _THREAD_ELEMENTS = 2048, 512, 16


def choose_rotary(heads: tuple[int, ...], rotary_dim: int, row_dim: int) -> KernelConfig:
    """The tile of a launch that rotates heads of several tensors.

    Args:
        heads: heads of each tensor; every tensor is cut into blocks of its own.
        rotary_dim: even, >= 2.
        row_dim: most elements of a head that a program touches, >= ``rotary_dim``.

    Returns:
        ``block_m`` heads by ``block_n`` elements to rotate. Among tiles of 512 to 2048 touched elements the
        one that leaves the fewest rows empty, the larger on a tie. ``num_stages`` is 1: there is no loop.
    """
    width = pad_block(row_dim, 2)
    most = max(1, min(_MOST_ELEMENTS // width, pad_block(max(heads), 1)))
    least = min(most, max(1, _LEAST_ELEMENTS // width))

    def padded(block: int) -> int:
        return sum(-(-count // block) * block for count in heads)

    sizes = [1 << bit for bit in range(least.bit_length() - 1, most.bit_length())]
    block = min(sizes, key=lambda size: (padded(size), -size))
    num_warps = min(8, max(1, block * width // (32 * _THREAD_ELEMENTS)))
    return KernelConfig(block_m=block, block_n=pad_block(rotary_dim, 2), num_warps=num_warps, num_stages=1)


def rotary_constexprs(
    config: KernelConfig, head_dim: int, rotary_dim: int, is_adjacent: bool, has_rest: bool, align: int
) -> dict[str, Any]:
    """What both kernels fix at compile time, by parameter name."""
    return {
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "IS_ADJACENT": is_adjacent,
        "HAS_REST": has_rest,
        "BLOCK_H": config.block_m,
        "BLOCK_P": config.block_n // 2,
        "BLOCK_C": pad_block(head_dim - rotary_dim, 1) if has_rest else 1,
        "ALIGN": align,
    }


def count_blocks(heads: tuple[int, ...], block: int) -> int:
    """Programs per token."""
    return sum(-(-count // block) for count in heads)


# Models in use: dtype, q heads, kv heads, head_dim, rotary_dim.
_MODELS = (
    (torch.bfloat16, (32, 8, 128, 128)),  # Llama 3, Qwen 3, Mistral
    (torch.float16, (32, 8, 128, 128)),
    (torch.float32, (32, 8, 128, 128)),
    (torch.bfloat16, (9, 3, 64, 64)),  # SmolLM2 135M
    (torch.bfloat16, (24, 8, 128, 96)),  # Phi 4 mini: partial
    (torch.bfloat16, (32, 32, 80, 32)),  # Phi 2: partial, no power of two
)


def list_variants(arch: Arch) -> tuple[Variant, ...]:
    """Every compilation of the rotary kernels by models in use, rows aligned.

    Closed per head shape: batch, lengths, heads, strides and addresses are run-time values, so that a model
    uses at most two variants of a kernel (rows aligned or not) per dtype and pairing.

    Args:
        arch: what it cannot convert is not listed. Otherwise every architecture has the same ones; there is
            nothing but loads and stores in them.
    """
    pools = [dtype for dtype in FP8_DTYPES if arch.has_fp8 or dtype == torch.float8_e5m2]
    variants: list[Variant] = []
    for dtype, shape in _MODELS:
        for is_adjacent in (True, False):
            variants += _list_rotations(shape, dtype, is_adjacent)
            variants.append(_append_variant(shape, dtype, dtype, is_adjacent))
    # What the pool holds makes no difference to the rest, so one model stands for all.
    dtype, shape = _MODELS[0]
    return (*variants, *(_append_variant(shape, dtype, pool, is_adjacent=False) for pool in pools))


def _list_rotations(
    shape: tuple[int, int, int, int], dtype: torch.dtype, is_adjacent: bool
) -> Iterator[Variant]:
    q_heads, kv_heads, head_dim, rotary_dim = shape
    # The engine rotates q and k as the one tensor that the projection leaves.
    for kind, heads, has_rest in (
        ("emb", (q_heads + kv_heads,), rotary_dim < head_dim),
        ("qk", (q_heads, kv_heads), False),
    ):
        config = choose_rotary(heads, rotary_dim, head_dim if has_rest else rotary_dim)
        yield describe_variant(
            f"rotary_{kind}_h{sum(heads)}_{_name_rows(shape, dtype, is_adjacent)}",
            rotate_qk_kernel,
            rotary_constexprs(config, head_dim, rotary_dim, is_adjacent, has_rest, 16),
            config,
            pointers=dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), dtype),
            tile=_describe_tile(config),
        )


def _append_variant(
    shape: tuple[int, int, int, int], dtype: torch.dtype, pool_dtype: torch.dtype, is_adjacent: bool
) -> Variant:
    q_heads, kv_heads, head_dim, rotary_dim = shape
    heads = (q_heads, kv_heads, kv_heads)
    config = choose_rotary(heads, rotary_dim, head_dim)
    constexprs = rotary_constexprs(config, head_dim, rotary_dim, is_adjacent, rotary_dim < head_dim, 16)
    pool = "" if pool_dtype == dtype else f"_{TRITON_TYPES[pool_dtype]}"
    return describe_variant(
        f"rotary_append_h{sum(heads)}_{_name_rows(shape, dtype, is_adjacent)}{pool}",
        append_rotated_kernel,
        constexprs | {"VALUE_DIM": head_dim, "BLOCK_V": pad_block(head_dim, 1)},
        config,
        pointers=dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), dtype)
        | dict.fromkeys(("k_buffer_ptr", "v_buffer_ptr"), pool_dtype),
        tile=_describe_tile(config),
    )


def _name_rows(shape: tuple[int, int, int, int], dtype: torch.dtype, is_adjacent: bool) -> str:
    _, _, head_dim, rotary_dim = shape
    return f"d{head_dim}_r{rotary_dim}_{TRITON_TYPES[dtype]}_{'adjacent' if is_adjacent else 'half'}"


def _describe_tile(config: KernelConfig) -> dict[str, int]:
    return {"heads": config.block_m, "elements": config.block_n}
