"""Tiny kernels, each with one property that the static report must see. Listed like the library's own."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from astrai_triton.ops.launch import Arch, KernelConfig, Variant


@triton.jit
def copy_rows_kernel(x_ptr, slots_ptr, out_ptr, x_stride, IS_WIDE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Gather rows; with ``IS_WIDE`` the slot has 64 bits before it is multiplied."""
    pid_t = tl.program_id(0)
    slot = tl.load(slots_ptr + pid_t)
    if IS_WIDE:
        slot = slot.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + slot * x_stride + offs_d)
    tl.store(out_ptr + pid_t.to(tl.int64) * BLOCK_D + offs_d, x)


@triton.jit
def walk_rows_kernel(
    x_ptr, slots_ptr, out_ptr, num_rows, x_stride, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Every product fits: bounded positions in 32 bits, slots in 64."""
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for tile in range(tl.cdiv(num_rows, BLOCK_N)):
        keep_n = tile * BLOCK_N + offs_n < num_rows
        slot = tl.load(slots_ptr + tile * BLOCK_N + offs_n, mask=keep_n, other=0).to(tl.int64)
        rows = slot[:, None] * x_stride + offs_d[None, :]
        total += tl.load(x_ptr + rows, mask=keep_n[:, None], other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n[:, None] * BLOCK_D + offs_d[None, :], total)


@triton.jit
def carry_offset_kernel(x_ptr, slots_ptr, out_ptr, num_rows, x_stride, BLOCK_D: tl.constexpr):
    """The narrow product reaches the address only through a branch and a loop-carried value."""
    offs_d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    offset = 0
    for row in range(num_rows):
        total += tl.load(x_ptr + offset + offs_d).to(tl.float32)
        slot = tl.load(slots_ptr + row)
        if slot >= 0:
            offset = slot * x_stride
    tl.store(out_ptr + offs_d, total)


@triton.jit
def attend_rows_kernel(
    q_ptr, kv_ptr, out_ptr, num_tiles, IS_IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Two chained products per turn; with ``IS_IEEE`` in float32, which no matrix instruction does."""
    offs_m, offs_n, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    q = tl.load(q_ptr + offs_m[:, None] * BLOCK_D + offs_d[None, :])
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    kv_ptrs = kv_ptr + offs_n[:, None] * BLOCK_D + offs_d[None, :]
    for _ in range(num_tiles):
        kv = tl.load(kv_ptrs)
        if IS_IEEE:
            scores = tl.dot(q.to(tl.float32), tl.trans(kv.to(tl.float32)), input_precision="ieee")
            total += tl.dot(scores, kv.to(tl.float32), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(kv))
            total += tl.dot(scores.to(kv.dtype), kv)
        kv_ptrs += BLOCK_N * BLOCK_D
    tl.store(out_ptr + offs_m[:, None] * BLOCK_D + offs_d[None, :], total.to(out_ptr.dtype.element_ty))


@triton.jit
def attend_slots_kernel(q_ptr, kv_ptr, slots_ptr, out_ptr, num_tiles, BLOCK: tl.constexpr):
    """The slots of a tile are loaded in the turn that needs them, which keeps the tile from being early."""
    offs, num_rows = tl.arange(0, BLOCK), num_tiles.to(tl.int64) * BLOCK
    square = offs[:, None] * BLOCK + offs[None, :]
    q = tl.load(q_ptr + square)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, num_rows, BLOCK):
        slots = tl.load(slots_ptr + start + offs).to(tl.int64)
        kv = tl.load(kv_ptr + slots[:, None] * BLOCK + offs[None, :])
        total += tl.dot(tl.dot(q, tl.trans(kv)).to(kv.dtype), kv)
    tl.store(out_ptr + square, total.to(out_ptr.dtype.element_ty))


def list_variants(arch: Arch) -> tuple[Variant, ...]:
    """All of them; the same on every architecture."""
    return (
        _rows("copy_wide", copy_rows_kernel, IS_WIDE=True),
        _rows("copy_narrow", copy_rows_kernel, IS_WIDE=False),
        _rows("walk_wide", walk_rows_kernel, BLOCK_N=32),
        _rows("carry_narrow", carry_offset_kernel),
        _attend("attend_mma", num_stages=3),
        _attend("attend_ieee", is_ieee=True, block=16),
        _attend("attend_spilling", head_dim=128, num_warps=1),
        _attend("attend_deep", head_dim=256, num_stages=8),
        _attend("attend_unknown_type", kind="*fp8e4b8"),
        _attend_slots("attend_slots"),
    )


def _rows(name: str, kernel: Any, **constexprs: Any) -> Variant:
    kinds = {"x_ptr": "*fp32", "slots_ptr": "*i32", "out_ptr": "*fp32", "num_rows": "i32", "x_stride": "i32"}
    constexprs["BLOCK_D"] = 64
    signature = {arg: kinds.get(arg, "constexpr") for arg in kernel.arg_names}
    return Variant(
        name=name, kernel=kernel, signature=signature, constexprs=constexprs, divisible=("x_ptr",),
        config=KernelConfig(block_m=1, block_n=32, num_warps=4, num_stages=1), uses_dot=False, tile={},
    )  # fmt: skip


def _attend(
    name: str, *, is_ieee: bool = False, block: int = 64, head_dim: int = 64, num_warps: int = 4,
    num_stages: int = 2, kind: str = "*bf16",
) -> Variant:  # fmt: skip
    kernel: Any = attend_rows_kernel
    pointers = ("q_ptr", "kv_ptr", "out_ptr")
    signature = dict.fromkeys(kernel.arg_names, "constexpr") | dict.fromkeys(pointers, kind)
    constexprs = {"IS_IEEE": is_ieee, "BLOCK_M": block, "BLOCK_N": block, "BLOCK_D": head_dim}
    return Variant(
        name=name, kernel=kernel, signature=signature | {"num_tiles": "i32"}, constexprs=constexprs,
        divisible=pointers, uses_dot=True, tile={},
        config=KernelConfig(block_m=block, block_n=block, num_warps=num_warps, num_stages=num_stages),
    )  # fmt: skip


def _attend_slots(name: str) -> Variant:
    kernel: Any = attend_slots_kernel
    pointers = {"q_ptr": "*bf16", "kv_ptr": "*bf16", "slots_ptr": "*i32", "out_ptr": "*bf16"}
    return Variant(
        name=name, kernel=kernel, signature=pointers | {"num_tiles": "i32", "BLOCK": "constexpr"},
        constexprs={"BLOCK": 64}, divisible=tuple(pointers), uses_dot=True, tile={},
        config=KernelConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
    )  # fmt: skip
