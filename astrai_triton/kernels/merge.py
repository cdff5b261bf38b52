"""Joining softmax states that were computed over different keys, always in the same order."""

import triton
import triton.language as tl

from astrai_triton.kernels.address import narrow, point_rows
from astrai_triton.kernels.decode import find_first_key
from astrai_triton.kernels.softmax import anchor, end_rows, log_sum


@triton.jit(
    do_not_specialize=["out_stride_b", "out_stride_h", "dense_len", "num_parts", "num_splits", "window_left"],
    do_not_specialize_on_alignment=[
        "o_part_ptr", "ml_part_ptr", "kv_indptr_ptr", "sinks_ptr", "out_ptr", "lse_ptr"
    ],
)  # fmt: skip
def merge_splits_kernel(
    o_part_ptr,  # [batch, q_heads, num_parts, VALUE_DIM] f32, not normalised
    ml_part_ptr,  # [batch, q_heads, num_parts, 2] f32, (max, sum)
    kv_indptr_ptr,  # [batch + 1] i32, paged only
    sinks_ptr,  # [q_heads]
    out_ptr,  # [batch, q_heads, VALUE_DIM]
    lse_ptr,  # [batch, q_heads] f32
    out_stride_b: tl.int64,
    out_stride_h: tl.int64,
    dense_len: tl.int32,
    num_parts: tl.int32,
    num_splits: tl.int32,
    window_left: tl.int32,
    value_scale: tl.float32,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_PAGED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """BLOCK_V columns of one head of one request, over the splits that had keys."""
    pid_b, pid_h, pid_v = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    batch_head = pid_b * tl.num_programs(1) + pid_h
    offs_s = tl.arange(0, BLOCK_S)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    keep_v = offs_v < VALUE_DIM
    kv_len = dense_len
    if IS_PAGED:
        kv_len = tl.load(kv_indptr_ptr + pid_b + 1) - tl.load(kv_indptr_ptr + pid_b)
    first_split = find_first_key(kv_len, window_left) // CHUNK
    stop = tl.minimum((kv_len + CHUNK - 1) // CHUNK - first_split, num_splits)

    score_max = tl.full([1], float("-inf"), tl.float32)
    score_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for s in range(0, stop, BLOCK_S):
        part = batch_head * num_parts + s + offs_s
        keep_s = s + offs_s < stop
        part_max = tl.load(ml_part_ptr + part * 2, mask=keep_s, other=float("-inf"))  # [BLOCK_S]
        part_sum = tl.load(ml_part_ptr + part * 2 + 1, mask=keep_s, other=0.0)  # [BLOCK_S]
        part_rows = point_rows(o_part_ptr, part, VALUE_DIM, offs_v, 16)
        values = tl.load(part_rows, mask=keep_s[:, None] & keep_v[None, :], other=0.0)  # [BLOCK_S, BLOCK_V]
        new_max = tl.maximum(score_max, tl.max(part_max, 0))
        shift = anchor(new_max)
        rescale = tl.exp2(score_max - shift)
        weights = tl.exp2(part_max - shift)
        score_sum = score_sum * rescale + tl.sum(part_sum * weights, 0)
        acc = acc * rescale + tl.sum(values * weights[:, None], 0)
        score_max = new_max

    one_head = pid_h + tl.arange(0, 1)
    factor, lse = end_rows(score_max, score_sum, sinks_ptr, one_head, one_head >= 0, value_scale, HAS_SINKS)
    out_row = out_ptr + pid_b * out_stride_b + pid_h * out_stride_h
    tl.store(out_row + offs_v, narrow(acc * factor, out_ptr.dtype.element_ty), mask=keep_v)
    if HAS_LSE:
        if pid_v == 0:
            tl.store(lse_ptr + batch_head + tl.arange(0, 1), lse)


@triton.jit(
    do_not_specialize=[
        "o_a_stride_t", "o_a_stride_h", "o_b_stride_t", "o_b_stride_h", "lse_a_stride_t", "lse_a_stride_h",
        "lse_b_stride_t", "lse_b_stride_h", "out_stride_t", "out_stride_h", "q_heads",
    ],
    do_not_specialize_on_alignment=["o_a_ptr", "lse_a_ptr", "o_b_ptr", "lse_b_ptr", "out_ptr", "lse_ptr"],
)  # fmt: skip
def merge_states_kernel(
    o_a_ptr,  # [tokens, q_heads, HEAD_DIM]
    lse_a_ptr,  # [tokens, q_heads] f32
    o_b_ptr,  # [tokens, q_heads, HEAD_DIM]
    lse_b_ptr,  # [tokens, q_heads] f32
    out_ptr,  # [tokens, q_heads, HEAD_DIM]
    lse_ptr,  # [tokens, q_heads] f32
    o_a_stride_t: tl.int64,
    o_a_stride_h: tl.int64,
    o_b_stride_t: tl.int64,
    o_b_stride_h: tl.int64,
    lse_a_stride_t: tl.int64,
    lse_a_stride_h: tl.int64,
    lse_b_stride_t: tl.int64,
    lse_b_stride_h: tl.int64,
    out_stride_t: tl.int64,
    out_stride_h: tl.int64,
    q_heads: tl.int32,
    HEAD_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join two normalised states of BLOCK_H heads of one token."""
    pid_t, pid_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_h = (pid_h * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    keep_h = offs_h < q_heads
    keep = keep_h[:, None] & (offs_d < HEAD_DIM)[None, :]
    lse_a_row = lse_a_ptr + pid_t * lse_a_stride_t
    lse_b_row = lse_b_ptr + pid_t * lse_b_stride_t
    to_base_2 = 1.4426950408889634
    max_a = tl.load(lse_a_row + offs_h * lse_a_stride_h, mask=keep_h, other=float("-inf")) * to_base_2
    max_b = tl.load(lse_b_row + offs_h * lse_b_stride_h, mask=keep_h, other=float("-inf")) * to_base_2
    new_max = tl.maximum(max_a, max_b)
    shift = anchor(new_max)
    weight_a, weight_b = tl.exp2(max_a - shift), tl.exp2(max_b - shift)  # [BLOCK_H]
    total = weight_a + weight_b
    inverse = 1 / tl.where(total > 0, total, 1.0)
    o_a_rows = point_rows(o_a_ptr + pid_t * o_a_stride_t, offs_h, o_a_stride_h, offs_d, ALIGN)
    o_b_rows = point_rows(o_b_ptr + pid_t * o_b_stride_t, offs_h, o_b_stride_h, offs_d, ALIGN)
    # A state without keys is not read: whatever stands there, it weighs nothing.
    keep_a, keep_b = keep & (weight_a > 0)[:, None], keep & (weight_b > 0)[:, None]
    o_a = tl.load(o_a_rows, mask=keep_a, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_D]
    o_b = tl.load(o_b_rows, mask=keep_b, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_D]
    out = o_a * (weight_a * inverse)[:, None] + o_b * (weight_b * inverse)[:, None]
    out_rows = point_rows(out_ptr + pid_t * out_stride_t, offs_h, out_stride_h, offs_d, ALIGN)
    tl.store(out_rows, narrow(out, out_ptr.dtype.element_ty), mask=keep)
    tl.store(lse_ptr + pid_t * q_heads + offs_h, log_sum(new_max, total), mask=keep_h)
