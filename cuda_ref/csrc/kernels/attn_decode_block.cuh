// What one block of a decode kernel works on: some keys of a request, and some of the query heads that share
// them.
#pragma once

#include <cstring>

#include "csrc/kernels/attn_common.h"
#include "csrc/kernels/attn_layout_policies.cuh"
#include "csrc/kernels/device.cuh"

namespace astrai {

// Elements that move together: rows have a multiple of these.
constexpr int RUN = 8;

// RUN elements from an address; by 16 bytes if it is a multiple of 16.
template <class T>
ASTRAI_DEVICE void load_run(T (&values)[RUN], const T* address, bool is_aligned) {
    constexpr int STEP = sizeof(Bytes16) / sizeof(T);
    if (is_aligned) {
        ASTRAI_UNROLL
        for (int i = 0; i < RUN; i += STEP) {
            const Bytes16 bytes = load_global(reinterpret_cast<const Bytes16*>(address + i));
            memcpy(values + i, &bytes, sizeof(Bytes16));
        }
    } else {
        ASTRAI_UNROLL
        for (int i = 0; i < RUN; ++i) {
            values[i] = load_global(address + i);
        }
    }
}

template <class T>
ASTRAI_DEVICE void store_run(T* address, const T (&values)[RUN], bool is_aligned) {
    constexpr int STEP = sizeof(Bytes16) / sizeof(T);
    if (is_aligned) {
        ASTRAI_UNROLL
        for (int i = 0; i < RUN; i += STEP) {
            Bytes16 bytes;
            memcpy(&bytes, values + i, sizeof(Bytes16));
            store_global(reinterpret_cast<Bytes16*>(address + i), bytes);
        }
    } else {
        ASTRAI_UNROLL
        for (int i = 0; i < RUN; ++i) {
            store_global(address + i, values[i]);
        }
    }
}

// Whether every row that starts at data, some strides on, starts at a multiple of 16 bytes.
ASTRAI_HOST_DEVICE bool has_aligned_rows(const void* data, int64_t stride_a, int64_t stride_b,
                                         int64_t stride_c, int element_size) {
    const int64_t bytes = (stride_a | stride_b | stride_c) * element_size;
    return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(bytes)) % sizeof(Bytes16) == 0;
}

ASTRAI_DEVICE bool has_aligned_keys(const AttnParams& p, int element_size) {
    return has_aligned_rows(p.k, p.k_stride_b, p.k_stride_n, p.k_stride_h, element_size) &&
           has_aligned_rows(p.v, p.v_stride_b, p.v_stride_n, p.v_stride_h, element_size) &&
           has_aligned_rows(p.new_k, p.new_k_stride_b, p.new_k_stride_h, 0, element_size) &&
           has_aligned_rows(p.new_v, p.new_v_stride_b, p.new_v_stride_h, 0, element_size);
}

// Grid: x over requests, KV heads and tiles of their query heads, the last fastest, so that blocks that run
// together read neighbouring bytes of the same slots; y over splits, so that blocks without keys come last.
// HEADS: query heads of a block; the query heads of a KV head are dealt out in tiles of so many.
template <class KV, int HEADS>
struct DecodeBlock {
    const AttnParams& params;
    int batch, split, kv_head;
    int first_head, num_heads;  // of q
    bool is_first_tile;         // of the heads of this KV head
    KV kv;
    int begin, end;  // positions of the split that the window and max_kv_len leave
    int64_t mask_base;

    ASTRAI_DEVICE static int num_head_tiles(const AttnParams& p) {
        return (p.q_heads / p.kv_heads + HEADS - 1) / HEADS;
    }
    ASTRAI_DEVICE static int request(const AttnParams& p) {
        return blockIdx.x / (p.kv_heads * num_head_tiles(p));
    }

    ASTRAI_DEVICE explicit DecodeBlock(const AttnParams& p)
        : params(p), batch(request(p)), split(blockIdx.y), kv(p, batch) {
        const int tiles = num_head_tiles(p);
        const int group = p.q_heads / p.kv_heads;
        const int head_block = blockIdx.x - batch * (p.kv_heads * tiles);
        kv_head = head_block / tiles;
        const int first_of_group = (head_block - kv_head * tiles) * HEADS;
        first_head = kv_head * group + first_of_group;
        num_heads = group - first_of_group < HEADS ? group - first_of_group : HEADS;
        is_first_tile = first_of_group == 0;

        const int split_begin = split * p.split_len;
        const int length = kv.kv_len < p.max_kv_len ? kv.kv_len : p.max_kv_len;
        end = length - split_begin > p.split_len ? split_begin + p.split_len : length;
        // q stands at the last position.
        const int first_seen = kv.kv_len - 1 - p.window_left;
        begin = first_seen > split_begin ? first_seen : split_begin;
        mask_base = batch * p.mask_stride_b;
        if constexpr (KV::IS_PAGED) {
            if (p.mask != nullptr) {
                mask_base = load_global(p.kv_indptr + batch) * p.mask_stride_n;
            }
        }
    }

    ASTRAI_DEVICE bool is_empty() const { return begin >= end; }

    // Slot of a key, or a negative number if it is not to be attended to; position is begin or later.
    ASTRAI_DEVICE int slot(int position) const {
        if (position >= end) {
            return -1;
        }
        if (params.mask != nullptr &&
            load_global(params.mask + mask_base + position * params.mask_stride_n) == 0) {
            return -1;
        }
        return kv.slot(position);
    }

    // Whether the key of a position is not in the pool yet.
    ASTRAI_DEVICE bool is_new(int position) const {
        return KV::IS_PAGED && params.new_k != nullptr && position == kv.kv_len - 1;
    }

    // Start of the K, and V, of a slot that is not negative.
    template <class T>
    ASTRAI_DEVICE T* k_row(int slot) const {
        return static_cast<T*>(params.k) + kv.k_offset(slot, kv_head);
    }
    template <class T>
    ASTRAI_DEVICE T* v_row(int slot) const {
        return static_cast<T*>(params.v) + kv.v_offset(slot, kv_head);
    }
    template <class T>
    ASTRAI_DEVICE const T* new_k_row() const {
        return static_cast<const T*>(params.new_k) + batch * params.new_k_stride_b +
               kv_head * params.new_k_stride_h;
    }
    template <class T>
    ASTRAI_DEVICE const T* new_v_row() const {
        return static_cast<const T*>(params.new_v) + batch * params.new_v_stride_b +
               kv_head * params.new_v_stride_h;
    }

    // One block per request and KV head stores the new token, seen or not: the first tile of heads of the
    // split that holds its position, or of the last one. Nobody reads it back.
    template <class T>
    ASTRAI_DEVICE void store_new_token(bool is_aligned) const {
        const int last = kv.kv_len - 1;
        if (!is_first_tile || last < 0 || !is_new(last)) {
            return;
        }
        const int owner = last / params.split_len;
        const int slot = kv.slot(last);
        if (split != (owner < params.num_splits ? owner : params.num_splits - 1) || slot < 0) {
            return;
        }
        const int k_runs = params.head_dim / RUN;
        const int num_runs = k_runs + params.value_dim / RUN;
        for (int run = threadIdx.x; run < num_runs; run += blockDim.x) {
            const bool is_k = run < k_runs;
            const int column = (is_k ? run : run - k_runs) * RUN;
            T values[RUN];
            load_run(values, (is_k ? new_k_row<T>() : new_v_row<T>()) + column, is_aligned);
            store_run((is_k ? k_row<T>(slot) : v_row<T>(slot)) + column, values, is_aligned);
        }
    }
};

}  // namespace astrai
