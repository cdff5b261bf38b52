"""Prefill attention, split over Q: dense or packed Q, contiguous or paged K and V, in one body.

A tile is BLOCK_M rows: some neighbouring positions of one request times HEADS heads of one KV group, so that
a tile of K and V serves them all. Keys come in ascending tiles of BLOCK_N, and those that a row does not see
leave it as it was: its bits depend neither on the rows beside it nor on the batch.
"""

import triton
import triton.language as tl

from astrai_triton.kernels.address import find_table_row, narrow, point_rows
from astrai_triton.kernels.keys import attend_keys
from astrai_triton.kernels.softmax import end_rows
from astrai_triton.kernels.split import count_tiles, split_keys

# Neither sizes nor addresses make a variant: row starts are described by ALIGN, strides are 64-bit.
_POINTERS = [
    "q_ptr", "k_ptr", "v_ptr", "req_to_token_ptr", "req_pool_indices_ptr", "kv_indptr_ptr", "qo_indptr_ptr",
    "q_tile_to_batch_ptr", "q_tile_to_index_ptr", "mask_ptr", "mask_indptr_ptr", "sinks_ptr", "out_ptr",
    "lse_ptr", "o_part_ptr", "ml_part_ptr",
]  # fmt: skip
_SIZES = [
    "q_stride_b", "q_stride_n", "q_stride_h", "k_stride_b", "k_stride_n", "k_stride_h", "v_stride_b",
    "v_stride_n", "v_stride_h", "table_stride_b", "table_stride_n", "mask_stride_b", "mask_stride_n",
    "out_stride_b", "out_stride_n", "out_stride_h", "group", "dense_q_len", "dense_kv_len", "num_q_tiles",
    "num_slots", "num_reqs", "context", "max_places", "window_left", "window_right",
]  # fmt: skip


@triton.jit
def find_tile(
    pid_x,
    qo_indptr_ptr,
    kv_indptr_ptr,
    q_tile_to_batch_ptr,
    q_tile_to_index_ptr,
    dense_q_len,
    dense_kv_len,
    num_q_tiles,
    max_places,
    POSITIONS: tl.constexpr,
    Q_TILE: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """Request, first position, split, and (q_start, q_len, kv_len) of a program, without a search.

    Packed: first the tiles of the map, then ``max_places`` places of each request for its further splits.
    Dense: requests, splits, tiles, the last innermost. Late tiles see the most keys when causal, so they come
    first. A program without work gets a position beyond q_len.
    """
    if IS_PACKED:
        PARTS: tl.constexpr = Q_TILE // POSITIONS if POSITIONS < Q_TILE else 1
        entry = num_q_tiles - 1 - pid_x // PARTS
        place = tl.maximum(-1 - entry, 0)
        request = place // max_places
        index = 0
        if entry >= 0:
            request = tl.load(q_tile_to_batch_ptr + entry)
            index = tl.load(q_tile_to_index_ptr + entry)
        q_start = tl.load(qo_indptr_ptr + request)
        q_len = tl.load(qo_indptr_ptr + request + 1) - q_start
        kv_len = tl.load(kv_indptr_ptr + request + 1) - tl.load(kv_indptr_ptr + request)
        tiles = count_tiles(q_len, Q_TILE)
        split = tl.where(entry >= 0, 0, 1 + place % max_places // tiles)
        index = tl.where(entry >= 0, index, place % max_places % tiles)
        tile_start = (index.to(tl.int64) * Q_TILE).to(tl.int32) + pid_x % PARTS * POSITIONS
        if POSITIONS > Q_TILE:
            # The first of the neighbours that a tile covers does the work of all.
            tile_start = tl.where(tile_start % POSITIONS == 0, tile_start, q_len)
    else:
        q_start, q_len, kv_len = 0, dense_q_len, dense_kv_len
        request, place = pid_x // num_q_tiles, pid_x % num_q_tiles
        tiles = count_tiles(q_len, POSITIONS)
        split = place // tiles
        tile_start = (tiles - 1 - place % tiles) * POSITIONS
    return request.to(tl.int64), tile_start, split, q_start, q_len, kv_len


@triton.jit
def find_range(
    first_position,
    last_position,
    key_start,
    key_stop,
    window_left,
    window_right,
    BLOCK_N: tl.constexpr,
    MASK_DIM: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Keys that some row from first to last position sees, as (first, behind the last); and of their tiles
    (start of the first, start of the bulk, behind the bulk): those that every row sees entirely."""
    first_key, last_key, bulk_stop = key_start, key_stop, key_stop
    if HAS_LEFT:
        first_key = tl.maximum(first_key, first_position - window_left)
    if HAS_RIGHT:
        last_key = tl.minimum(last_key, last_position + window_right + 1)
        bulk_stop = tl.minimum(bulk_stop, first_position + window_right + 1)
    start = first_key // BLOCK_N * BLOCK_N
    bulk_start = start
    if MASK_DIM > 0:
        bulk_stop = start
    elif HAS_LEFT:
        last_tile = (tl.maximum(last_key, start) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        every_start = tl.maximum(first_key, last_position - window_left)
        bulk_start = tl.minimum((every_start + BLOCK_N - 1) // BLOCK_N * BLOCK_N, last_tile)
    bulk_stop = tl.maximum(tl.maximum(bulk_stop, 0) // BLOCK_N * BLOCK_N, bulk_start)
    return first_key, last_key, start, bulk_start, bulk_stop


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def attend_prefill_kernel(
    q_ptr,  # [batch, q_len, q_heads, HEAD_DIM], packed [tokens, q_heads, HEAD_DIM]
    k_ptr,  # [batch, kv_len, kv_heads, HEAD_DIM], paged [slots, kv_heads, HEAD_DIM]
    v_ptr,  # like k, VALUE_DIM
    req_to_token_ptr,  # [num_reqs, context] i32, paged only
    req_pool_indices_ptr,  # [batch] i32, paged only
    kv_indptr_ptr,  # [batch + 1] i32, packed only
    qo_indptr_ptr,  # [batch + 1] i32, packed only
    q_tile_to_batch_ptr,  # [num_q_tiles] i32, packed only
    q_tile_to_index_ptr,  # [num_q_tiles] i32, packed only
    mask_ptr,  # [batch, kv_len] or [batch, q_len, kv_len], packed [mask_indptr[batch]], i1
    mask_indptr_ptr,  # [batch + 1] i64, with a packed mask only
    sinks_ptr,  # [q_heads]
    out_ptr,  # like q, VALUE_DIM
    lse_ptr,  # [batch, q_len, q_heads] f32, packed [tokens, q_heads]
    o_part_ptr,  # [batch * max_places * Q_TILE, q_heads, VALUE_DIM] f32, with IS_SPLIT only
    ml_part_ptr,  # [batch * max_places * Q_TILE, q_heads, 2] f32, with IS_SPLIT only
    q_stride_b: tl.int64,
    q_stride_n: tl.int64,
    q_stride_h: tl.int64,
    k_stride_b: tl.int64,
    k_stride_n: tl.int64,
    k_stride_h: tl.int64,
    v_stride_b: tl.int64,
    v_stride_n: tl.int64,
    v_stride_h: tl.int64,
    table_stride_b: tl.int64,
    table_stride_n: tl.int64,
    mask_stride_b: tl.int64,
    mask_stride_n: tl.int64,
    out_stride_b: tl.int64,
    out_stride_n: tl.int64,
    out_stride_h: tl.int64,
    group: tl.int32,  # q heads of a kv head
    dense_q_len: tl.int32,
    dense_kv_len: tl.int32,
    num_q_tiles: tl.int32,  # in the map; dense: tiles times splits of a request
    num_slots: tl.int32,
    num_reqs: tl.int32,
    context: tl.int32,
    max_places: tl.int32,  # tiles times splits of a request that is split
    window_left: tl.int32,  # 2^30 when unbounded
    window_right: tl.int32,  # 0 when causal
    score_scale: tl.float32,  # > 0: |softmax_scale| * k_scale, over softcap or times log2(e)
    score_sign: tl.float32,  # of softmax_scale: 1, 0 or -1
    cap: tl.float32,  # softcap * log2(e)
    value_scale: tl.float32,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # of a group in one tile, a power of two
    Q_TILE: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    DOT: tl.constexpr,
    MASK_DIM: tl.constexpr,  # 0 without a mask
    IS_PACKED: tl.constexpr,
    IS_PAGED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One tile of rows over its keys or one split of them; axis 1 is KV heads times shares of a group."""
    POSITIONS: tl.constexpr = BLOCK_M // HEADS
    pid_x, pid_h = tl.program_id(0), tl.program_id(1)
    pid_b, tile_start, split, q_start, q_len, kv_len = find_tile(
        pid_x, qo_indptr_ptr, kv_indptr_ptr, q_tile_to_batch_ptr, q_tile_to_index_ptr, dense_q_len,
        dense_kv_len, num_q_tiles, max_places, POSITIONS, Q_TILE, IS_PACKED,
    )  # fmt: skip
    splits, key_start, key_stop = 1, 0, kv_len
    if IS_SPLIT:
        splits, origin, chunk = split_keys(q_len, kv_len, window_left, max_places, Q_TILE, MIN_CHUNK)
        key_start = origin + (split.to(tl.int64) * chunk).to(tl.int32)
        key_stop = tl.minimum(kv_len, key_start + chunk)
    if (tile_start >= q_len) | (split >= splits):
        return

    group_tiles = (group + HEADS - 1) // HEADS
    kv_head = (pid_h // group_tiles).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d, offs_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    offs_q = tile_start + offs_m // HEADS  # [BLOCK_M], positions in the request
    first_in_group = pid_h % group_tiles * HEADS
    first_head = kv_head * group + first_in_group
    keep_m = (offs_q < q_len) & (first_in_group + offs_m % HEADS < group)
    keep_d, keep_v = offs_d < HEAD_DIM, offs_v < VALUE_DIM

    k_head, v_head = k_ptr + kv_head * k_stride_h, v_ptr + kv_head * v_stride_h
    table_row, mask_base, mask_offs = req_to_token_ptr, mask_ptr, offs_q
    if IS_PAGED:
        row = tl.load(req_pool_indices_ptr + pid_b)
        table_row, has_row = find_table_row(req_to_token_ptr, row, table_stride_b, num_reqs)
        # What is beyond the table is masked.
        key_stop = tl.minimum(key_stop, tl.where(has_row, context, 0))
    else:
        k_head += pid_b * k_stride_b
        v_head += pid_b * v_stride_b
    if MASK_DIM > 0:
        if IS_PACKED:
            mask_base += tl.load(mask_indptr_ptr + pid_b)
            mask_offs = offs_q.to(tl.int64) * kv_len
        else:
            mask_base += pid_b * mask_stride_b
            mask_offs = offs_q * mask_stride_n

    # Bases are scalar, and rows add their small place in the tile: 64-bit tokens and heads of every row would
    # stay in registers through the loops.
    q_base = q_ptr + pid_b * q_stride_b + (q_start + tile_start) * q_stride_n + first_head * q_stride_h
    q_offs = offs_m // HEADS * q_stride_n + offs_m % HEADS * q_stride_h
    q_rows = point_rows(q_base, q_offs, 1, offs_d, ALIGN)
    q = tl.load(q_rows, mask=keep_m[:, None] & keep_d[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]
    q = (q.to(tl.float32) * score_sign).to(DOT)
    position = kv_len - q_len + tile_start
    last_position = kv_len - q_len + tl.minimum(tile_start + POSITIONS, q_len) - 1
    first_key, last_key, start, bulk_start, bulk_stop = find_range(
        position, last_position, key_start, key_stop, window_left, window_right, BLOCK_N, MASK_DIM, HAS_LEFT,
        HAS_RIGHT,
    )  # fmt: skip
    score_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    score_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # 0 is the left edge of the window, 1 the bulk that needs no mask, 2 the right edge and the last keys.
    FIRST: tl.constexpr = 2 if MASK_DIM > 0 else 0 if HAS_LEFT else 1
    for PHASE in tl.static_range(FIRST, 3):
        phase_start = start if PHASE == 0 else bulk_start if PHASE == 1 else bulk_stop
        phase_stop = bulk_start if PHASE == 0 else bulk_stop if PHASE == 1 else last_key
        acc, score_max, score_sum = attend_keys(
            acc, score_max, score_sum, q, kv_len - q_len + offs_q, keep_m, phase_start, phase_stop, first_key,
            last_key, k_head, v_head, k_stride_n, v_stride_n, table_row, table_stride_n, num_slots,
            mask_base, mask_offs, score_scale, cap, window_left, window_right, HEAD_DIM, VALUE_DIM, BLOCK_N,
            BLOCK_D, BLOCK_V, MASK_DIM, IS_PAGED, PHASE == 1, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, DOT, ALIGN,
        )  # fmt: skip

    # Axis 2 has one program. The compiler does not know that, so it computes these rows anew; found equal to
    # those above, they would stay in registers through the loops.
    offs_m = tl.arange(0, BLOCK_M) + tl.program_id(2)
    offs_n, offs_h = offs_m // HEADS, offs_m % HEADS
    keep_m = (offs_n < q_len - tile_start) & (offs_h < group - first_in_group)
    keep_o = keep_m[:, None] & keep_v[None, :]
    num_q_heads = (tl.num_programs(1) // group_tiles).to(tl.int64) * group
    q_heads = first_head + offs_h  # [BLOCK_M]
    if IS_SPLIT:
        if splits > 1:
            offs_q = tile_start + offs_n
            tile = (offs_q // Q_TILE).to(tl.int64)
            place = (pid_b * max_places + tile * splits + split) * Q_TILE + offs_q % Q_TILE
            part = place * num_q_heads + q_heads  # [BLOCK_M]
            tl.store(point_rows(o_part_ptr, part, VALUE_DIM, offs_v, 16), acc, mask=keep_o)
            tl.store(ml_part_ptr + part * 2, score_max, mask=keep_m)
            tl.store(ml_part_ptr + part * 2 + 1, score_sum, mask=keep_m)
            return
    factor, lse = end_rows(score_max, score_sum, sinks_ptr, q_heads, keep_m, value_scale, HAS_SINKS)
    out_base = out_ptr + pid_b * out_stride_b + (q_start + tile_start) * out_stride_n
    out_offs = offs_n * out_stride_n + q_heads * out_stride_h
    out_rows = point_rows(out_base, out_offs, 1, offs_v, ALIGN)
    tl.store(out_rows, narrow(acc * factor[:, None], out_ptr.dtype.element_ty), mask=keep_o)
    if HAS_LSE:
        tokens = pid_b * dense_q_len + (q_start + tile_start) + offs_n
        tl.store(lse_ptr + tokens * num_q_heads + q_heads, lse, mask=keep_m)
