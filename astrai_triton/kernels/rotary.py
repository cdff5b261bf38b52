"""Rotary position embedding of the heads of q and k."""

import triton
import triton.language as tl

from astrai_triton.kernels.address import narrow, point_rows

# Neither sizes nor addresses make a variant: row starts are described by ALIGN, strides are 64-bit.
_POINTERS = ["q_ptr", "k_ptr", "freqs_ptr", "q_out_ptr", "k_out_ptr"]
_SIZES = [
    "q_stride_b", "q_stride_t", "q_stride_h", "k_stride_b", "k_stride_t", "k_stride_h",
    "freqs_stride_b", "freqs_stride_t", "q_out_stride_b", "q_out_stride_t",
    "q_out_stride_h", "k_out_stride_b", "k_out_stride_t", "k_out_stride_h",
    "q_len", "q_heads", "k_heads",
]  # fmt: skip


@triton.jit
def load_turn(
    freqs_row,  # [ROTARY_DIM / 2, 2] f32, (cos, sin)
    ROTARY_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """cos and sin of one position, each [1, BLOCK_P]: one contiguous load, split in registers."""
    offs_f = tl.arange(0, 2 * BLOCK_P)
    freqs = tl.load(
        tl.multiple_of(freqs_row, ALIGN) + offs_f, mask=offs_f < ROTARY_DIM, other=0.0
    )  # [2 * BLOCK_P]
    return tl.split(tl.reshape(freqs, [1, BLOCK_P, 2]))


@triton.jit
def quantize(
    x,  # any shape
    inverse_scale,  # f32
    DTYPE: tl.constexpr,
):
    """x itself, or for an fp8 DTYPE x * inverse_scale in DTYPE, held within its finite range."""
    if DTYPE.primitive_bitwidth == 8:
        # The largest finite values; beyond them e4m3 has only NaN.
        limit: tl.constexpr = 57344.0 if DTYPE == tl.float8e5 else 448.0
        scaled = tl.minimum(tl.maximum(x.to(tl.float32) * inverse_scale, -limit), limit)
        x = narrow(scaled, DTYPE)
    return x


@triton.jit
def rotate_heads(
    x_token,  # [heads, >= ROTARY_DIM]
    out_token,  # [heads, >= ROTARY_DIM], dtype of x_token or fp8; may be x_token
    x_stride,  # of heads
    out_stride,
    offs_h,  # [BLOCK_H]
    heads,
    cos,  # [1, BLOCK_P]
    sin,  # [1, BLOCK_P]
    inverse_scale,  # f32, of an fp8 out_token
    ROTARY_DIM: tl.constexpr,
    IS_ADJACENT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Turn the first ROTARY_DIM elements of some heads of a token; computes in float32, rounds once.

    What goes to fp8 is rounded to the dtype of x_token before, as if it had been turned in place first.
    """
    X_DTYPE: tl.constexpr = x_token.dtype.element_ty
    OUT_DTYPE: tl.constexpr = out_token.dtype.element_ty
    keep_h = (offs_h < heads)[:, None]
    offs_d = tl.arange(0, 2 * BLOCK_P)
    offs_p = tl.arange(0, BLOCK_P)
    if IS_ADJACENT:
        # Both elements of a pair lie in one thread's vector: one wide load, split in registers.
        keep_d = keep_h & (offs_d < ROTARY_DIM)[None, :]
        x = tl.load(point_rows(x_token, offs_h, x_stride, offs_d, ALIGN), mask=keep_d, other=0.0)
        x = x.to(tl.float32)  # [BLOCK_H, 2 * BLOCK_P]
        a, b = tl.split(tl.reshape(x, [x.shape[0], BLOCK_P, 2]))  # [BLOCK_H, BLOCK_P] each
        turned = tl.interleave(a * cos - b * sin, b * cos + a * sin)  # [BLOCK_H, 2 * BLOCK_P]
        turned = quantize(narrow(turned, X_DTYPE), inverse_scale, OUT_DTYPE)
        tl.store(point_rows(out_token, offs_h, out_stride, offs_d, ALIGN), turned, mask=keep_d)
    else:
        HALF: tl.constexpr = ROTARY_DIM // 2
        keep_p = keep_h & (offs_p < HALF)[None, :]
        a = tl.load(point_rows(x_token, offs_h, x_stride, offs_p, ALIGN), mask=keep_p, other=0.0)
        b = tl.load(point_rows(x_token, offs_h, x_stride, HALF + offs_p, ALIGN), mask=keep_p, other=0.0)
        a, b = a.to(tl.float32), b.to(tl.float32)  # [BLOCK_H, BLOCK_P] each
        first = narrow(a * cos - b * sin, X_DTYPE)
        second = narrow(b * cos + a * sin, X_DTYPE)
        first = quantize(first, inverse_scale, OUT_DTYPE)
        second = quantize(second, inverse_scale, OUT_DTYPE)
        tl.store(point_rows(out_token, offs_h, out_stride, offs_p, ALIGN), first, mask=keep_p)
        tl.store(point_rows(out_token, offs_h, out_stride, HALF + offs_p, ALIGN), second, mask=keep_p)


@triton.jit
def copy_heads(
    x_token,  # [heads, >= STOP]
    out_token,  # [heads, >= STOP], dtype of x_token or fp8
    x_stride,  # of heads
    out_stride,
    offs_h,  # [BLOCK_H]
    heads,
    inverse_scale,  # f32, of an fp8 out_token
    START: tl.constexpr,
    STOP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Copy elements START to STOP - 1 of some heads of a token, bit for bit unless they go to fp8."""
    offs_d = START + tl.arange(0, BLOCK_C)
    keep_d = (offs_h < heads)[:, None] & (offs_d < STOP)[None, :]
    x = tl.load(point_rows(x_token, offs_h, x_stride, offs_d, ALIGN), mask=keep_d, other=0.0)
    held = quantize(x, inverse_scale, out_token.dtype.element_ty)
    tl.store(point_rows(out_token, offs_h, out_stride, offs_d, ALIGN), held, mask=keep_d)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def rotate_qk_kernel(
    q_ptr,  # [batch, q_len, q_heads, HEAD_DIM]
    k_ptr,  # [batch, q_len, k_heads, HEAD_DIM]; any pointer when k_heads is 0
    freqs_ptr,  # [batch, q_len, ROTARY_DIM / 2, 2] f32, (cos, sin)
    q_out_ptr,  # as q; may be q itself
    k_out_ptr,  # as k; may be k itself
    q_stride_b: tl.int64,
    q_stride_t: tl.int64,
    q_stride_h: tl.int64,
    k_stride_b: tl.int64,
    k_stride_t: tl.int64,
    k_stride_h: tl.int64,
    freqs_stride_b: tl.int64,
    freqs_stride_t: tl.int64,
    q_out_stride_b: tl.int64,
    q_out_stride_t: tl.int64,
    q_out_stride_h: tl.int64,
    k_out_stride_b: tl.int64,
    k_out_stride_t: tl.int64,
    k_out_stride_h: tl.int64,
    q_len,
    q_heads,
    k_heads,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_ADJACENT: tl.constexpr,
    HAS_REST: tl.constexpr,  # copy the elements from ROTARY_DIM on; in place they stay untouched
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes that divide the start of every head and of every row of freqs: 16 or 1
):
    """Rotate BLOCK_H heads of q, or of k, at one position; the head blocks of a position lie side by side."""
    q_blocks = tl.cdiv(q_heads, BLOCK_H)
    blocks = q_blocks + tl.cdiv(k_heads, BLOCK_H)
    pid_t, pid_h = tl.program_id(0) // blocks, (tl.program_id(0) % blocks).to(tl.int64)
    pid_b, pid_l = (pid_t // q_len).to(tl.int64), (pid_t % q_len).to(tl.int64)
    freqs_row = freqs_ptr + pid_b * freqs_stride_b + pid_l * freqs_stride_t
    cos, sin = load_turn(freqs_row, ROTARY_DIM, BLOCK_P, ALIGN)  # [1, BLOCK_P] each
    if pid_h < q_blocks:
        offs_h = pid_h * BLOCK_H + tl.arange(0, BLOCK_H)
        x_token = q_ptr + pid_b * q_stride_b + pid_l * q_stride_t
        out_token = q_out_ptr + pid_b * q_out_stride_b + pid_l * q_out_stride_t
        rotate_heads(
            x_token, out_token, q_stride_h, q_out_stride_h, offs_h, q_heads, cos, sin, 1.0,
            ROTARY_DIM, IS_ADJACENT, BLOCK_P, ALIGN,
        )  # fmt: skip
        if HAS_REST:
            copy_heads(
                x_token, out_token, q_stride_h, q_out_stride_h, offs_h, q_heads, 1.0,
                ROTARY_DIM, HEAD_DIM, BLOCK_C, ALIGN,
            )  # fmt: skip
    else:
        offs_h = (pid_h - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        x_token = k_ptr + pid_b * k_stride_b + pid_l * k_stride_t
        out_token = k_out_ptr + pid_b * k_out_stride_b + pid_l * k_out_stride_t
        rotate_heads(
            x_token, out_token, k_stride_h, k_out_stride_h, offs_h, k_heads, cos, sin, 1.0,
            ROTARY_DIM, IS_ADJACENT, BLOCK_P, ALIGN,
        )  # fmt: skip
        if HAS_REST:
            copy_heads(
                x_token, out_token, k_stride_h, k_out_stride_h, offs_h, k_heads, 1.0,
                ROTARY_DIM, HEAD_DIM, BLOCK_C, ALIGN,
            )  # fmt: skip
