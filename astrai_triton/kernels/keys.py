"""The walk of a tile of q rows along its keys: where they lie, which rows see them, the online softmax."""

import triton
import triton.language as tl

from astrai_triton.kernels.address import point_rows
from astrai_triton.kernels.softmax import anchor, cap_scores


@triton.jit
def find_rows(
    keys,  # [BLOCK_N] i32
    first_key,
    last_key,  # within the table
    table_row,  # [context] i32, paged only
    table_stride_n,
    num_slots,
    IS_PAGED: tl.constexpr,
    IS_BULK: tl.constexpr,
):
    """Rows of K and V that hold keys, i32; -1 for a key outside of [first_key, last_key) or without a slot.

    Contiguous keys of the bulk are in range by construction, and come back as they are.
    """
    keep = (keys >= first_key) & (keys < last_key)
    if IS_PAGED:
        slots = tl.load(table_row + keys.to(tl.int64) * table_stride_n, mask=keep, other=-1)  # [BLOCK_N]
        return tl.where(slots < num_slots, slots, -1)
    elif IS_BULK:
        return keys
    else:
        return tl.where(keep, keys, -1)


@triton.jit
def see_keys(
    keep_n,  # [BLOCK_N]
    keys,  # [BLOCK_N]
    positions,  # [BLOCK_M]
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    IS_BULK: tl.constexpr,
):
    """Which row sees which key, [BLOCK_M, BLOCK_N], or [1, BLOCK_N] where all rows see the same."""
    seen = keep_n[None, :]
    if HAS_RIGHT and not IS_BULK:
        seen = seen & (keys[None, :] <= positions[:, None] + window_right)
    if HAS_LEFT and not IS_BULK:
        seen = seen & (keys[None, :] >= positions[:, None] - window_left)
    return seen


@triton.jit
def attend_keys(
    acc,  # [BLOCK_M, BLOCK_V] f32
    score_max,  # [BLOCK_M] f32
    score_sum,  # [BLOCK_M] f32
    q,  # [BLOCK_M, BLOCK_D] DOT
    positions,  # [BLOCK_M] i32, where the rows stand among the keys
    keep_m,  # [BLOCK_M]
    start,
    stop,
    first_key,  # keys outside of [first_key, last_key) are not read
    last_key,
    k_head,  # pointer to row 0 of the head
    v_head,
    k_stride_n,
    v_stride_n,
    table_row,
    table_stride_n,
    num_slots,
    mask_base,  # [kv_len] or [q_len, kv_len] i1, of the request
    mask_offs,  # [BLOCK_M] i64, of the rows in it
    scale,  # > 0
    cap,
    window_left,
    window_right,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASK_DIM: tl.constexpr,
    IS_PAGED: tl.constexpr,
    IS_BULK: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Take in the tiles of keys from ``start`` to ``stop``; in the bulk every row sees every one of them.

    ``scale`` brings scores to base 2; with a softcap it divides by the cap, and ``cap`` is in base 2.
    """
    offs_n, offs_d, offs_v = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    keep_d, keep_v = (offs_d < HEAD_DIM)[None, :], (offs_v < VALUE_DIM)[None, :]
    # The rows of a tile are carried into the iteration that reads it: were the table read there, K and V
    # could not be on their way num_stages - 1 tiles ahead.
    rows = find_rows(
        start + offs_n, first_key, last_key, table_row, table_stride_n, num_slots, IS_PAGED, IS_BULK
    )  # [BLOCK_N]
    for n in tl.range(start, stop, BLOCK_N):
        keys = n + offs_n
        next_rows = find_rows(
            keys + BLOCK_N, first_key, last_key, table_row, table_stride_n, num_slots, IS_PAGED,
            IS_BULK,
        )  # fmt: skip
        keep_n = rows >= 0
        if MASK_DIM == 2:
            keep_n = keep_n & tl.load(mask_base + keys, mask=keep_n, other=0).to(tl.int1)
        if MASK_DIM == 3:
            seen = see_keys(keep_n, keys, positions, window_left, window_right, HAS_LEFT, HAS_RIGHT, IS_BULK)
            kept_rows = mask_base + mask_offs[:, None] + keys[None, :]
            seen = seen & keep_m[:, None]
            seen = tl.load(kept_rows, mask=seen, other=0).to(tl.int1) & seen  # [BLOCK_M, BLOCK_N]
            # What no row of the tile sees is not read: it may be NaN, and 0 * NaN is NaN.
            keep_n = keep_n & (tl.max(seen.to(tl.int32), 0) > 0)
        k_rows = point_rows(k_head, rows, k_stride_n, offs_d, ALIGN)
        keep_k = keep_d if IS_BULK and not IS_PAGED else keep_n[:, None] & keep_d
        k = tl.load(k_rows, mask=keep_k, other=0.0)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if HAS_SOFTCAP:
            scores = cap_scores(scores * scale, cap)
        if IS_PAGED or not IS_BULK:
            if MASK_DIM != 3:
                seen = see_keys(
                    keep_n, keys, positions, window_left, window_right, HAS_LEFT, HAS_RIGHT, IS_BULK
                )
            scores = tl.where(seen, scores, float("-inf"))
        if HAS_SOFTCAP:
            new_max = tl.maximum(score_max, tl.max(scores, 1))
            shift = anchor(new_max)
            weights = tl.exp2(scores - shift[:, None])  # [BLOCK_M, BLOCK_N]
        else:
            # The scale is positive: the maximum may come first, and the product becomes part of an fma.
            new_max = tl.maximum(score_max, tl.max(scores, 1) * scale)
            shift = anchor(new_max)
            weights = tl.exp2(scores * scale - shift[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(score_max - shift)
        score_sum = score_sum * rescale + tl.sum(weights, 1)
        score_max = new_max
        v_rows = point_rows(v_head, rows, v_stride_n, offs_v, ALIGN)
        # The mask is the select on V: what is not seen arrives as zeros.
        keep_kv = keep_v if IS_BULK and not IS_PAGED else keep_n[:, None] & keep_v
        v = tl.load(v_rows, mask=keep_kv, other=0.0)  # [BLOCK_N, BLOCK_V]
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(DOT), v.to(DOT), acc, input_precision="ieee")  # [BLOCK_M, BLOCK_V]
        rows = next_rows
    return acc, score_max, score_sum
