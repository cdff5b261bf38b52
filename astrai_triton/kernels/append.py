"""Rotary position embedding fused with the write of K and V into the paged cache."""

import triton
import triton.language as tl

from astrai_triton.kernels.rotary import copy_heads, load_turn, rotate_heads

# Neither sizes nor addresses make a variant: row starts are described by ALIGN, strides are 64-bit.
_POINTERS = [
    "q_ptr", "k_ptr", "v_ptr", "freqs_ptr", "k_buffer_ptr", "v_buffer_ptr", "out_cache_loc_ptr",
]  # fmt: skip
_SIZES = [
    "q_stride_t", "q_stride_h", "k_stride_t", "k_stride_h", "v_stride_t", "v_stride_h",
    "freqs_stride_t", "k_buffer_stride_n", "k_buffer_stride_h", "v_buffer_stride_n", "v_buffer_stride_h",
    "loc_stride_t", "num_slots", "q_heads", "kv_heads",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def append_rotated_kernel(
    q_ptr,  # [tokens, q_heads, HEAD_DIM], rotated in place
    k_ptr,  # [tokens, kv_heads, HEAD_DIM]
    v_ptr,  # [tokens, kv_heads, VALUE_DIM]
    freqs_ptr,  # [tokens, ROTARY_DIM / 2, 2] f32, (cos, sin)
    k_buffer_ptr,  # [num_slots, kv_heads, HEAD_DIM], dtype of k or fp8
    v_buffer_ptr,  # [num_slots, kv_heads, VALUE_DIM], dtype of k_buffer
    out_cache_loc_ptr,  # [tokens] i32
    q_stride_t: tl.int64,
    q_stride_h: tl.int64,
    k_stride_t: tl.int64,
    k_stride_h: tl.int64,
    v_stride_t: tl.int64,
    v_stride_h: tl.int64,
    freqs_stride_t: tl.int64,
    k_buffer_stride_n: tl.int64,
    k_buffer_stride_h: tl.int64,
    v_buffer_stride_n: tl.int64,
    v_buffer_stride_h: tl.int64,
    loc_stride_t: tl.int64,
    num_slots: tl.int64,
    q_heads,
    kv_heads,
    inverse_k_scale: tl.float32,  # of an fp8 k_buffer
    inverse_v_scale: tl.float32,  # of an fp8 v_buffer
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_ADJACENT: tl.constexpr,
    HAS_REST: tl.constexpr,  # ROTARY_DIM < HEAD_DIM
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes that divide the start of every head and of every row of freqs: 16 or 1
):
    """At one token: rotate BLOCK_H heads of q in place, or of k into its slot, or copy heads of v to theirs.

    A slot below 0 or from num_slots on drops the token's K and V; its q is rotated all the same.
    """
    q_blocks, kv_blocks = tl.cdiv(q_heads, BLOCK_H), tl.cdiv(kv_heads, BLOCK_H)
    blocks = q_blocks + 2 * kv_blocks
    pid_t, pid_h = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64)
    freqs_row = freqs_ptr + pid_t * freqs_stride_t
    cos, sin = load_turn(freqs_row, ROTARY_DIM, BLOCK_P, ALIGN)  # [1, BLOCK_P] each
    if pid_h < q_blocks:
        offs_h = pid_h * BLOCK_H + tl.arange(0, BLOCK_H)
        q_token = q_ptr + pid_t * q_stride_t
        rotate_heads(
            q_token, q_token, q_stride_h, q_stride_h, offs_h, q_heads, cos, sin, 1.0,
            ROTARY_DIM, IS_ADJACENT, BLOCK_P, ALIGN,
        )  # fmt: skip
    else:
        slot = tl.load(out_cache_loc_ptr + pid_t * loc_stride_t).to(tl.int64)
        # A dropped token has no heads to write.
        heads = tl.where((slot >= 0) & (slot < num_slots), kv_heads, 0)
        offs_h = (pid_h - q_blocks) % kv_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
        if pid_h < q_blocks + kv_blocks:
            k_token = k_ptr + pid_t * k_stride_t
            k_slot = k_buffer_ptr + slot * k_buffer_stride_n
            rotate_heads(
                k_token, k_slot, k_stride_h, k_buffer_stride_h, offs_h, heads, cos, sin, inverse_k_scale,
                ROTARY_DIM, IS_ADJACENT, BLOCK_P, ALIGN,
            )  # fmt: skip
            if HAS_REST:
                copy_heads(
                    k_token, k_slot, k_stride_h, k_buffer_stride_h, offs_h, heads, inverse_k_scale,
                    ROTARY_DIM, HEAD_DIM, BLOCK_C, ALIGN,
                )  # fmt: skip
        else:
            v_token = v_ptr + pid_t * v_stride_t
            v_slot = v_buffer_ptr + slot * v_buffer_stride_n
            copy_heads(
                v_token, v_slot, v_stride_h, v_buffer_stride_h, offs_h, heads, inverse_v_scale,
                0, VALUE_DIM, BLOCK_V, ALIGN,
            )  # fmt: skip
