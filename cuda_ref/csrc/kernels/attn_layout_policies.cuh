// Where the rows of q that a block works on come from, and where the keys of a request lie.
#pragma once

#include "csrc/kernels/attn_common.h"
#include "csrc/kernels/device.cuh"

namespace astrai {

// Keys of one request in contiguous K and V: a slot is the position itself.
struct ContigKV {
    static constexpr bool IS_PAGED = false;
    const AttnParams& params;
    int kv_len;
    int64_t k_base, v_base;

    ASTRAI_DEVICE ContigKV(const AttnParams& p, int batch)
        : params(p), kv_len(p.kv_len), k_base(batch * p.k_stride_b), v_base(batch * p.v_stride_b) {}

    // Slot of the key at a position below kv_len; -1 if it is masked.
    ASTRAI_DEVICE int slot(int position) const { return position; }
    ASTRAI_DEVICE int64_t k_offset(int slot, int kv_head) const {
        return k_base + static_cast<int64_t>(slot) * params.k_stride_n + kv_head * params.k_stride_h;
    }
    ASTRAI_DEVICE int64_t v_offset(int slot, int kv_head) const {
        return v_base + static_cast<int64_t>(slot) * params.v_stride_n + kv_head * params.v_stride_h;
    }
};

// Keys of one request in a pool, through its row of req_to_token.
struct PagedKV {
    static constexpr bool IS_PAGED = true;
    const AttnParams& params;
    int kv_len;
    const int32_t* table;  // null if the request has no row

    ASTRAI_DEVICE PagedKV(const AttnParams& p, int batch) : params(p), table(nullptr) {
        kv_len = load_global(p.kv_indptr + batch + 1) - load_global(p.kv_indptr + batch);
        const int row = load_global(p.req_pool_indices + batch);
        if (row >= 0 && row < p.num_reqs) {
            table = p.req_to_token + row * p.table_stride_r;
        }
    }

    ASTRAI_DEVICE int slot(int position) const {
        if (table == nullptr || position < 0 || position >= params.context) {
            return -1;
        }
        const int slot = load_global(table + position * params.table_stride_n);
        return slot < params.num_slots ? slot : -1;
    }
    ASTRAI_DEVICE int64_t k_offset(int slot, int kv_head) const {
        return static_cast<int64_t>(slot) * params.k_stride_n + kv_head * params.k_stride_h;
    }
    ASTRAI_DEVICE int64_t v_offset(int slot, int kv_head) const {
        return static_cast<int64_t>(slot) * params.v_stride_n + kv_head * params.v_stride_h;
    }
};

// A tile of a rectangular batch: grid (q tiles * batch, q_heads, ...), for only x outgrows 65535. Requests vary
// fastest, and tiles that see most keys under a causal mask start first.
struct DenseQSchedule {
    static constexpr bool IS_PACKED = false;
    int batch, tile, q_len;
    int64_t first_token, q_base, out_base, mask_base;
    int64_t mask_stride_t, mask_stride_n;

    ASTRAI_DEVICE explicit DenseQSchedule(const AttnParams& p)
        : batch(static_cast<int>(blockIdx.x) % p.batch), tile(0), q_len(p.q_len),
          first_token(static_cast<int64_t>(batch) * p.q_len), q_base(batch * p.q_stride_b),
          out_base(batch * p.out_stride_b), mask_base(batch * p.mask_stride_b),
          mask_stride_t(p.mask_stride_t), mask_stride_n(p.mask_stride_n) {
        tile = (q_len - 1) / Q_TILE - static_cast<int>(blockIdx.x) / p.batch;
    }
};

// A tile of a packed batch, found through the work maps: grid (num_q_tiles, q_heads, ...). A tile of a
// request that does not exist has no rows.
struct PackedQSchedule {
    static constexpr bool IS_PACKED = true;
    int batch, tile, q_len;
    int64_t first_token, q_base, out_base, mask_base;
    int64_t mask_stride_t, mask_stride_n;

    ASTRAI_DEVICE explicit PackedQSchedule(const AttnParams& p)
        : batch(load_global(p.q_tile_to_batch + blockIdx.x)), tile(load_global(p.q_tile_to_index + blockIdx.x)),
          q_len(0), first_token(0), q_base(0), out_base(0), mask_base(0), mask_stride_t(0), mask_stride_n(1) {
        if (batch < 0 || batch >= p.batch || tile < 0) {
            batch = 0;
            return;
        }
        const int begin = load_global(p.qo_indptr + batch);
        q_len = load_global(p.qo_indptr + batch + 1) - begin;
        first_token = begin;
        q_base = first_token * p.q_stride_t;
        out_base = first_token * p.out_stride_t;
        if (p.mask != nullptr) {
            mask_base = load_global(p.mask_indptr + batch);
            // The scores of a row lie one after the other.
            mask_stride_t = load_global(p.kv_indptr + batch + 1) - load_global(p.kv_indptr + batch);
        }
    }
};

}  // namespace astrai
