"""Splits of prefill along the keys: how many a request gets, and the merge of their partial states."""

import triton
import triton.language as tl

from astrai_triton.kernels.address import narrow, point_rows
from astrai_triton.kernels.softmax import anchor, end_rows


@triton.jit
def count_tiles(
    q_len,
    Q_TILE: tl.constexpr,
):
    """q tiles of a request, at least one."""
    return tl.maximum((q_len + Q_TILE - 1) // Q_TILE, 1)


@triton.jit
def split_keys(
    q_len,
    kv_len,
    window_left,
    max_places,
    Q_TILE: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
):
    """How the keys of a request are split, by its own lengths alone: (splits, first key, keys per split).

    Tiles times splits stay within ``max_places``, so that few q tiles over many keys become more programs.
    """
    origin = tl.maximum(kv_len - q_len - window_left, 0) // MIN_CHUNK * MIN_CHUNK
    num_keys = tl.maximum(kv_len - origin, 0)
    splits = tl.minimum(max_places // count_tiles(q_len, Q_TILE), (num_keys + MIN_CHUNK - 1) // MIN_CHUNK)
    splits = tl.maximum(splits, 1)
    # A multiple of every BLOCK_N, so that tiles of keys lie at the same keys with and without splits.
    chunk = ((num_keys + splits - 1) // splits + 127) // 128 * 128
    return splits, origin, chunk


@triton.jit(
    do_not_specialize=[
        "out_stride_b", "out_stride_n", "out_stride_h", "dense_q_len", "dense_kv_len",
        "max_places", "max_tiles", "window_left",
    ],
    do_not_specialize_on_alignment=[
        "o_part_ptr", "ml_part_ptr", "qo_indptr_ptr", "kv_indptr_ptr", "sinks_ptr", "out_ptr", "lse_ptr"
    ],
)  # fmt: skip
def merge_prefill_kernel(
    o_part_ptr,  # [batch * max_places * Q_TILE, q_heads, VALUE_DIM] f32, not normalised
    ml_part_ptr,  # [batch * max_places * Q_TILE, q_heads, 2] f32, (max, sum)
    qo_indptr_ptr,  # [batch + 1] i32, packed only
    kv_indptr_ptr,  # [batch + 1] i32, packed only
    sinks_ptr,  # [q_heads]
    out_ptr,  # [batch, q_len, q_heads, VALUE_DIM], or [tokens, q_heads, VALUE_DIM] when packed
    lse_ptr,  # [batch, q_len, q_heads] f32, or [tokens, q_heads] when packed
    out_stride_b: tl.int64,
    out_stride_n: tl.int64,
    out_stride_h: tl.int64,
    dense_q_len: tl.int32,
    dense_kv_len: tl.int32,
    max_places: tl.int32,
    max_tiles: tl.int32,  # most q tiles of a request that is split
    window_left: tl.int32,
    value_scale: tl.float32,
    VALUE_DIM: tl.constexpr,
    Q_TILE: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One head of BLOCK_M positions of one request, over its splits in ascending order."""
    PARTS: tl.constexpr = Q_TILE // BLOCK_M
    blocks = max_tiles.to(tl.int64) * PARTS
    pid_b = tl.program_id(0) // blocks
    tile_start = (tl.program_id(0) % blocks * BLOCK_M).to(tl.int32)
    pid_h = tl.program_id(1)
    q_start = 0
    q_len = dense_q_len
    kv_len = dense_kv_len
    if IS_PACKED:
        q_start = tl.load(qo_indptr_ptr + pid_b)
        q_len = tl.load(qo_indptr_ptr + pid_b + 1) - q_start
        kv_len = tl.load(kv_indptr_ptr + pid_b + 1) - tl.load(kv_indptr_ptr + pid_b)
    splits, _, _ = split_keys(q_len, kv_len, window_left, max_places, Q_TILE, MIN_CHUNK)
    if (splits == 1) | (tile_start >= q_len):
        return

    offs_q = tile_start + tl.arange(0, BLOCK_M)
    offs_v = tl.arange(0, BLOCK_V)
    keep_m = offs_q < q_len
    keep_o = keep_m[:, None] & (offs_v < VALUE_DIM)[None, :]
    place = pid_b * max_places + (offs_q // Q_TILE).to(tl.int64) * splits  # [BLOCK_M], of split 0
    score_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    score_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for split in range(0, splits):
        part = ((place + split) * Q_TILE + offs_q % Q_TILE) * tl.num_programs(1) + pid_h  # [BLOCK_M]
        part_max = tl.load(ml_part_ptr + part * 2, mask=keep_m, other=float("-inf"))
        part_sum = tl.load(ml_part_ptr + part * 2 + 1, mask=keep_m, other=0.0)
        part_rows = o_part_ptr + part[:, None] * VALUE_DIM + offs_v[None, :]
        values = tl.load(part_rows, mask=keep_o, other=0.0)  # [BLOCK_M, BLOCK_V]
        new_max = tl.maximum(score_max, part_max)
        shift = anchor(new_max)
        rescale, weights = tl.exp2(score_max - shift), tl.exp2(part_max - shift)
        score_sum = score_sum * rescale + part_sum * weights
        acc = acc * rescale[:, None] + values * weights[:, None]
        score_max = new_max

    heads = pid_h + tl.zeros([BLOCK_M], tl.int32)
    factor, lse = end_rows(score_max, score_sum, sinks_ptr, heads, keep_m, value_scale, HAS_SINKS)
    tokens = q_start + offs_q
    out_base = out_ptr + pid_b * out_stride_b + pid_h * out_stride_h
    out_rows = point_rows(out_base, tokens, out_stride_n, offs_v, ALIGN)
    tl.store(out_rows, narrow(acc * factor[:, None], out_ptr.dtype.element_ty), mask=keep_o)
    if HAS_LSE:
        lse_row = (pid_b * dense_q_len + tokens) * tl.num_programs(1) + pid_h
        tl.store(lse_ptr + lse_row, lse, mask=keep_m)
