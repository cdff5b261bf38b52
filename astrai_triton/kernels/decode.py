"""Split-KV decode attention: one row of q per request, over contiguous or paged K and V."""

import triton
import triton.language as tl

from astrai_triton.kernels.address import find_slots, find_table_row, narrow, point_rows
from astrai_triton.kernels.softmax import cap_scores, end_rows, update_softmax

# Neither sizes nor addresses make a variant: row starts are described by ALIGN, strides are 64-bit.
_POINTERS = [
    "q_ptr", "k_ptr", "v_ptr", "new_k_ptr", "new_v_ptr", "req_to_token_ptr", "req_pool_indices_ptr",
    "kv_indptr_ptr", "mask_ptr", "sinks_ptr", "out_ptr", "lse_ptr", "o_part_ptr", "ml_part_ptr",
]  # fmt: skip
_SIZES = [
    "q_stride_b", "q_stride_h", "k_stride_b", "k_stride_n", "k_stride_h", "v_stride_b", "v_stride_n",
    "v_stride_h", "new_k_stride_b", "new_k_stride_h", "new_v_stride_b", "new_v_stride_h", "table_stride_b",
    "table_stride_n", "mask_stride_b", "mask_stride_n", "out_stride_b", "out_stride_h", "dense_len",
    "num_slots", "num_reqs", "context", "num_parts", "window_left",
]  # fmt: skip


@triton.jit
def find_first_key(
    kv_len,  # i32
    window_left,  # i32, 2^31 - 1 when unbounded
):
    """First key that the last position of a request sees."""
    return tl.maximum(kv_len - 1 - window_left, 0)


@triton.jit
def find_keys(
    positions,  # [n] i32
    start,
    stop,
    table_row,  # [context] i32, paged only
    table_stride_n,
    context,
    num_slots,
    mask_row,  # [kv_len] i1, with HAS_MASK only
    mask_stride_n,
    IS_PAGED: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Where the keys of positions lie, i32: slot or position; -1 for a key that is not seen."""
    keep = (positions >= start) & (positions < stop)
    if HAS_MASK:
        keep = keep & tl.load(mask_row + positions.to(tl.int64) * mask_stride_n, mask=keep, other=0).to(
            tl.int1
        )
    if IS_PAGED:
        return find_slots(table_row, positions, keep, table_stride_n, context, num_slots)
    return tl.where(keep, positions, -1)


@triton.jit
def store_key(
    row,  # [BLOCK_D] of the new token
    pool_ptr,  # [slots, kv_heads, d], at the head
    slot,  # i32, negative: not stored
    stride_n,
    inverse_scale,  # f32
    offs_d,
    keep_d,
):
    """Bring a new row to the pool's type, store it, and return it as the pool will give it back, in f32."""
    DTYPE: tl.constexpr = pool_ptr.dtype.element_ty
    row = row.to(tl.float32)
    if DTYPE.primitive_bitwidth == 8:
        # The largest finite values; beyond them e4m3 has only NaN.
        limit: tl.constexpr = 57344.0 if DTYPE == tl.float8e5 else 448.0
        row = tl.minimum(tl.maximum(row * inverse_scale, -limit), limit)
    held = narrow(row, DTYPE)
    if slot >= 0:
        tl.store(pool_ptr + slot.to(tl.int64) * stride_n + offs_d, held, mask=keep_d)
    return held.to(tl.float32)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def attend_decode_kernel(
    q_ptr,  # [batch, q_heads, HEAD_DIM]
    k_ptr,  # paged [slots, kv_heads, HEAD_DIM], else [batch, dense_len, kv_heads, HEAD_DIM]
    v_ptr,  # like k, VALUE_DIM
    new_k_ptr,  # [batch, kv_heads, HEAD_DIM], with HAS_NEW only
    new_v_ptr,  # [batch, kv_heads, VALUE_DIM], with HAS_NEW only
    req_to_token_ptr,  # [num_reqs, context] i32, paged only
    req_pool_indices_ptr,  # [batch] i32, paged only
    kv_indptr_ptr,  # [batch + 1] i32, paged only
    mask_ptr,  # paged [kv_indptr[batch]], else [batch, dense_len], i1
    sinks_ptr,  # [q_heads]
    out_ptr,  # [batch, q_heads, VALUE_DIM], without IS_SPLIT only
    lse_ptr,  # [batch, q_heads] f32, without IS_SPLIT only
    o_part_ptr,  # [batch, q_heads, num_parts, VALUE_DIM] f32, with IS_SPLIT only
    ml_part_ptr,  # [batch, q_heads, num_parts, 2] f32, with IS_SPLIT only
    q_stride_b: tl.int64,
    q_stride_h: tl.int64,
    k_stride_b: tl.int64,
    k_stride_n: tl.int64,
    k_stride_h: tl.int64,
    v_stride_b: tl.int64,
    v_stride_n: tl.int64,
    v_stride_h: tl.int64,
    new_k_stride_b: tl.int64,
    new_k_stride_h: tl.int64,
    new_v_stride_b: tl.int64,
    new_v_stride_h: tl.int64,
    table_stride_b: tl.int64,
    table_stride_n: tl.int64,
    mask_stride_b: tl.int64,
    mask_stride_n: tl.int64,
    out_stride_b: tl.int64,
    out_stride_h: tl.int64,
    dense_len: tl.int32,
    num_slots: tl.int32,
    num_reqs: tl.int32,
    context: tl.int32,
    num_parts: tl.int32,
    window_left: tl.int32,
    score_scale: tl.float32,  # of the dot: softmax_scale * k_scale, over softcap or times log2(e)
    cap: tl.float32,  # softcap * log2(e)
    inverse_k_scale: tl.float32,
    inverse_v_scale: tl.float32,
    value_scale: tl.float32,
    GROUP: tl.constexpr,  # q heads of a kv head
    GROUP_TILES: tl.constexpr,  # tiles of BLOCK_M of them
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,  # keys of a split, a multiple of BLOCK_N
    ALIGN: tl.constexpr,
    DOT: tl.constexpr,
    IS_PAGED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One split of one request for the q heads of one kv head.

    With HAS_NEW the split that owns the last position takes K and V of that position from new_k and new_v,
    and stores them. A split without keys writes nothing, unless it is the only one.
    """
    pid_b, pid_h, pid_s = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_head = (pid_h // GROUP_TILES).to(tl.int64)
    group_tile = pid_h % GROUP_TILES
    offs_m = group_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_V)
    keep_m, keep_d, keep_v = offs_m < GROUP, offs_d < HEAD_DIM, offs_v < VALUE_DIM
    q_heads = kv_head * GROUP + offs_m

    kv_len = dense_len
    table_row, mask_row = req_to_token_ptr, mask_ptr
    k_head, v_head = k_ptr + kv_head * k_stride_h, v_ptr + kv_head * v_stride_h
    if IS_PAGED:
        kv_start = tl.load(kv_indptr_ptr + pid_b)
        kv_len = tl.load(kv_indptr_ptr + pid_b + 1) - kv_start
        table_row, has_row = find_table_row(
            req_to_token_ptr, tl.load(req_pool_indices_ptr + pid_b), table_stride_b, num_reqs
        )
        context = tl.where(has_row, context, 0)
        if HAS_MASK:
            mask_row = mask_ptr + kv_start.to(tl.int64) * mask_stride_n
    else:
        k_head += pid_b * k_stride_b
        v_head += pid_b * v_stride_b
        if HAS_MASK:
            mask_row = mask_ptr + pid_b * mask_stride_b

    # Splits lie at multiples of CHUNK whatever the window is; those wholly before it are not launched.
    first_key = find_first_key(kv_len, window_left)
    start = (first_key // CHUNK + pid_s) * CHUNK
    if IS_SPLIT:
        if start >= kv_len:
            return
    start = start.to(tl.int32)
    last = kv_len - 1
    stop = tl.minimum(start + CHUNK, kv_len - 1 if HAS_NEW else kv_len)
    begin = tl.maximum(start, first_key // BLOCK_N * BLOCK_N)

    q_rows = point_rows(q_ptr + pid_b * q_stride_b, q_heads, q_stride_h, offs_d, ALIGN)
    keep_q = keep_m[:, None] & keep_d[None, :]
    q = tl.load(q_rows, mask=keep_q, other=0.0).to(DOT)  # [BLOCK_M, BLOCK_D]
    score_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    score_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    # The slots of a tile are carried into the iteration that reads it: were they loaded there, K and V could
    # not be on their way num_stages - 1 tiles ahead.
    keys = find_keys(
        begin + offs_n, first_key, stop, table_row, table_stride_n, context, num_slots, mask_row,
        mask_stride_n, IS_PAGED, HAS_MASK,
    )  # fmt: skip
    for n in range(begin, stop, BLOCK_N):
        next_keys = find_keys(
            n + BLOCK_N + offs_n, first_key, stop, table_row, table_stride_n, context, num_slots, mask_row,
            mask_stride_n, IS_PAGED, HAS_MASK,
        )  # fmt: skip
        keep_n = keys >= 0
        k_rows = point_rows(k_head, keys, k_stride_n, offs_d, ALIGN)
        k = tl.load(k_rows, mask=keep_n[:, None] & keep_d[None, :], other=0.0)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee") * score_scale  # [BLOCK_M, BLOCK_N]
        if HAS_SOFTCAP:
            scores = cap_scores(scores, cap)
        scores = tl.where(keep_n[None, :], scores, float("-inf"))
        weights, rescale, score_max, score_sum = update_softmax(scores, score_max, score_sum)
        v_rows = point_rows(v_head, keys, v_stride_n, offs_v, ALIGN)
        # The mask is the select on V: what is not seen arrives as zeros.
        v = tl.load(v_rows, mask=keep_n[:, None] & keep_v[None, :], other=0.0)  # [BLOCK_N, BLOCK_V]
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(DOT), v.to(DOT), acc, input_precision="ieee")  # [BLOCK_M, BLOCK_V]
        keys = next_keys

    if HAS_NEW:
        if (last >= start) & (last < start + CHUNK):
            slot = find_slots(table_row, last, has_row, table_stride_n, context, num_slots)
            new_k_row = new_k_ptr + pid_b * new_k_stride_b + kv_head * new_k_stride_h
            new_v_row = new_v_ptr + pid_b * new_v_stride_b + kv_head * new_v_stride_h
            new_k = tl.load(new_k_row + offs_d, mask=keep_d, other=0.0)  # [BLOCK_D]
            new_v = tl.load(new_v_row + offs_v, mask=keep_v, other=0.0)  # [BLOCK_V]
            # Every tile of the group attends to the new key, the first one stores it.
            target = tl.where(group_tile == 0, slot, -1)
            new_k = store_key(new_k, k_head, target, k_stride_n, inverse_k_scale, offs_d, keep_d)
            new_v = store_key(new_v, v_head, target, v_stride_n, inverse_v_scale, offs_v, keep_v)
            keep_new = slot >= 0
            if HAS_MASK:
                keep_new = keep_new & tl.load(mask_row + last.to(tl.int64) * mask_stride_n).to(tl.int1)
            # [BLOCK_M, BLOCK_D] again, in the layout of sums instead of that of products.
            q_f32 = tl.load(q_rows, mask=keep_q, other=0.0).to(tl.float32)
            score = tl.sum(q_f32 * new_k[None, :], 1) * score_scale  # [BLOCK_M]
            if HAS_SOFTCAP:
                score = cap_scores(score, cap)
            score = tl.where(keep_new, score, float("-inf"))
            weights, rescale, score_max, score_sum = update_softmax(score[:, None], score_max, score_sum)
            acc = acc * rescale[:, None] + weights * tl.where(keep_new, new_v, 0.0)[None, :]

    keep_acc = keep_m[:, None] & keep_v[None, :]
    num_kv_heads = tl.num_programs(1).to(tl.int64) // GROUP_TILES
    batch_head = pid_b * num_kv_heads * GROUP + q_heads  # [BLOCK_M]
    if IS_SPLIT:
        part = batch_head * num_parts + pid_s
        tl.store(point_rows(o_part_ptr, part, VALUE_DIM, offs_v, 16), acc, mask=keep_acc)
        tl.store(ml_part_ptr + part * 2, score_max, mask=keep_m)
        tl.store(ml_part_ptr + part * 2 + 1, score_sum, mask=keep_m)
    else:
        factor, lse = end_rows(score_max, score_sum, sinks_ptr, q_heads, keep_m, value_scale, HAS_SINKS)
        out_rows = point_rows(out_ptr + pid_b * out_stride_b, q_heads, out_stride_h, offs_v, ALIGN)
        tl.store(out_rows, narrow(acc * factor[:, None], out_ptr.dtype.element_ty), mask=keep_acc)
        if HAS_LSE:
            tl.store(lse_ptr + batch_head, lse, mask=keep_m)
