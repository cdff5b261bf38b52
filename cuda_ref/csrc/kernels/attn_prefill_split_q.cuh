// Prefill on plain float32 arithmetic: split over rows of q, any dtype, any strides.
//
// A block holds ROWS rows of one q head and walks over the keys that some of them see, KEYS at a time. K and
// V pass through the same shared memory one after the other. Each warp owns some rows: a lane scores one key
// for all of them, then accumulates some columns of V for all of them.
#pragma once

#include "csrc/kernels/attn_layout_policies.cuh"
#include "csrc/kernels/attn_prefill_rows.cuh"
#include "csrc/kernels/attn_warp_utils.cuh"

namespace astrai {
namespace prefill {

template <class T, int HEAD_DIM>
struct ScalarShape {
    static_assert(HEAD_DIM % WARP_SIZE == 0, "a lane owns every 32nd column");
    static constexpr int WARPS = 4;
    static constexpr int THREADS = WARPS * WARP_SIZE;
    // Half a q tile: a whole one in float32 leaves no room for K at head_dim 256.
    static constexpr int ROWS = 32;
    static constexpr int ROWS_OF_WARP = ROWS / WARPS;
    static constexpr int KEYS = WARP_SIZE;
    static constexpr int COLS_OF_LANE = HEAD_DIM / WARP_SIZE;

    // Elements of T that a lane reads at once, 16 bytes. One such piece of padding puts those that the lanes
    // read of different rows in different banks.
    static constexpr int PIECE = 16 / sizeof(T);
    static constexpr int PITCH = HEAD_DIM + PIECE;

    // [ROWS, HEAD_DIM] float, [KEYS, PITCH] T, [ROWS, KEYS] float, [WARPS, KEYS] int.
    static constexpr int Q_OFFSET = 0;
    static constexpr int KV_OFFSET = Q_OFFSET + ROWS * HEAD_DIM * 4;
    static constexpr int WEIGHTS_OFFSET = KV_OFFSET + KEYS * PITCH * static_cast<int>(sizeof(T));
    static constexpr int SLOTS_OFFSET = WEIGHTS_OFFSET + ROWS * KEYS * 4;
    static constexpr int SHARED_BYTES = SLOTS_OFFSET + WARPS * KEYS * 4;
};

// 16 bytes of a row.
template <class T>
struct alignas(16) Piece {
    T value[16 / sizeof(T)];
};

template <class T, int HEAD_DIM, class Q, class KV>
struct ScalarPrefill {
    using Shape = ScalarShape<T, HEAD_DIM>;
    static constexpr int ROWS_OF_WARP = Shape::ROWS_OF_WARP;
    static constexpr int KEYS = Shape::KEYS;
    static constexpr int COLS_OF_LANE = Shape::COLS_OF_LANE;

    const AttnParams& params;
    const Q& schedule;
    const KV& kv;
    const int first_row;  // of the block
    const int q_head = blockIdx.y;
    const int kv_head = q_head / (params.q_heads / params.kv_heads);
    const int warp = threadIdx.x / WARP_SIZE;
    const int lane = threadIdx.x % WARP_SIZE;

    const Shared<float> q_tile = shared_array<float>(Shape::Q_OFFSET, Shape::ROWS * HEAD_DIM);
    const Shared<T> kv_tile = shared_array<T>(Shape::KV_OFFSET, KEYS * Shape::PITCH);
    const Shared<float> weights = shared_array<float>(Shape::WEIGHTS_OFFSET, Shape::ROWS * KEYS);
    const Shared<int> slots = shared_array<int>(Shape::SLOTS_OFFSET, Shape::WARPS * KEYS);

    SoftmaxState softmax[ROWS_OF_WARP];  // the sum is that over the keys of this lane
    float acc[ROWS_OF_WARP][COLS_OF_LANE];  // column lane + 32 c

    ASTRAI_DEVICE ScalarPrefill(const AttnParams& p, const Q& q, const KV& keys, int row)
        : params(p), schedule(q), kv(keys), first_row(row) {
        SoftmaxState start = start_softmax(params, q_head);
        start.sum = lane == 0 ? start.sum : 0.0f;
        ASTRAI_UNROLL
        for (int r = 0; r < ROWS_OF_WARP; ++r) {
            softmax[r] = start;
            ASTRAI_UNROLL
            for (int c = 0; c < COLS_OF_LANE; ++c) {
                acc[r][c] = 0.0f;
            }
        }
    }

    ASTRAI_DEVICE int row_of_warp(int r) const { return first_row + warp * ROWS_OF_WARP + r; }

    // Rows beyond the request are zero.
    ASTRAI_DEVICE void load_q() const {
        const T* q = static_cast<const T*>(params.q) + schedule.q_base + q_head * params.q_stride_h;
        ASTRAI_NO_UNROLL
        for (int r = warp; r < Shape::ROWS; r += Shape::WARPS) {
            const int row = first_row + r;
            ASTRAI_NO_UNROLL
            for (int col = lane; col < params.head_dim; col += WARP_SIZE) {
                const bool keep = row < schedule.q_len;
                const float x = keep ? to_float(load_global(q + row * params.q_stride_t + col)) : 0.0f;
                q_tile.store(r * HEAD_DIM + col, x);
            }
        }
    }

    ASTRAI_DEVICE bool sees(int row, int key) const {
        if (row >= schedule.q_len || !window_of_row(params, schedule.q_len, kv.kv_len, row).has(key)) {
            return false;
        }
        return params.mask == nullptr ||
               load_global(params.mask + schedule.mask_base + row * schedule.mask_stride_t +
                           key * schedule.mask_stride_n) != 0;
    }

    // Finds the slot of this lane's key, and which rows of the warp see it: bit r for row r.
    ASTRAI_DEVICE uint32_t find_key(int key, KeyRange range) const {
        const int slot = range.has(key) ? kv.slot(key) : -1;
        uint32_t seen = 0;
        ASTRAI_NO_UNROLL
        for (int r = 0; slot >= 0 && r < ROWS_OF_WARP; ++r) {
            seen |= sees(row_of_warp(r), key) ? 1u << r : 0u;
        }
        slots.store(warp * KEYS + lane, seen != 0 ? slot : -1);
        return seen;
    }

    // Slot of a key that rows of any warp see, else -1.
    ASTRAI_DEVICE int slot_of_block(int n) const {
        int slot = -1;
        ASTRAI_UNROLL
        for (int w = 0; w < Shape::WARPS; ++w) {
            const int slot_of_warp = slots.load(w * KEYS + n);
            slot = slot_of_warp >= 0 ? slot_of_warp : slot;
        }
        return slot;
    }

    // Keys that no row sees are not read; they become zero, because their weight 0 times NaN would be NaN.
    template <class Offset>
    ASTRAI_DEVICE void load_kv(const void* source, int num_cols, Offset offset) const {
        ASTRAI_NO_UNROLL
        for (int n = warp; n < KEYS; n += Shape::WARPS) {
            const int slot = slot_of_block(n);
            const T* row = static_cast<const T*>(source) + (slot >= 0 ? offset(slot) : 0);
            ASTRAI_NO_UNROLL
            for (int col = lane; col < num_cols; col += WARP_SIZE) {
                kv_tile.store(n * Shape::PITCH + col,
                              slot >= 0 ? load_global(row + col) : from_float<T>(0.0f));
            }
        }
    }

    // Products of this lane's key with the rows of the warp.
    ASTRAI_DEVICE void multiply_qk(float (&products)[ROWS_OF_WARP]) const {
        ASTRAI_UNROLL
        for (int r = 0; r < ROWS_OF_WARP; ++r) {
            products[r] = 0.0f;
        }
        const int q_begin = warp * ROWS_OF_WARP * HEAD_DIM;
        ASTRAI_NO_UNROLL
        for (int col = 0; col < params.head_dim; col += Shape::PIECE) {
            const auto k = kv_tile.template load_as<Piece<T>>(lane * Shape::PITCH + col);
            ASTRAI_UNROLL
            for (int part = 0; part < Shape::PIECE; part += 4) {
                ASTRAI_UNROLL
                for (int r = 0; r < ROWS_OF_WARP; ++r) {
                    const auto q = q_tile.template load_as<Piece<float>>(q_begin + r * HEAD_DIM + col + part);
                    ASTRAI_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        products[r] += q.value[i] * to_float(k.value[part + i]);
                    }
                }
            }
        }
    }

    // Weights of the tile's keys, to shared memory; what came before is scaled to the new maximum.
    ASTRAI_DEVICE void weigh_keys(uint32_t seen) {
        float scores[ROWS_OF_WARP];
        multiply_qk(scores);
        scale_scores<ROWS_OF_WARP>(params, scores);
        ASTRAI_UNROLL
        for (int r = 0; r < ROWS_OF_WARP; ++r) {
            const float score = (seen >> r & 1u) != 0 ? scores[r] : -INFINITY;
            const float maximum = fmaxf(softmax[r].maximum, warp_max(score));
            const float base = softmax_base(maximum);
            const float rescale = exp2f(softmax[r].maximum - base);
            const float weight = exp2f(score - base);
            weights.store((warp * ROWS_OF_WARP + r) * KEYS + lane, weight);
            softmax[r] = {maximum, softmax[r].sum * rescale + weight};
            ASTRAI_UNROLL
            for (int c = 0; c < COLS_OF_LANE; ++c) {
                acc[r][c] *= rescale;
            }
        }
    }

    ASTRAI_DEVICE void accumulate_v() {
        const int weights_begin = warp * ROWS_OF_WARP * KEYS;
        ASTRAI_NO_UNROLL
        for (int n = 0; n < KEYS; n += 4) {
            float v[COLS_OF_LANE][4];
            ASTRAI_UNROLL
            for (int c = 0; c < COLS_OF_LANE; ++c) {
                const int col = lane + c * WARP_SIZE;
                ASTRAI_UNROLL
                for (int i = 0; i < 4; ++i) {
                    v[c][i] =
                        col < params.value_dim ? to_float(kv_tile.load((n + i) * Shape::PITCH + col)) : 0.0f;
                }
            }
            ASTRAI_UNROLL
            for (int r = 0; r < ROWS_OF_WARP; ++r) {
                const auto weight = weights.template load_as<Piece<float>>(weights_begin + r * KEYS + n);
                ASTRAI_UNROLL
                for (int c = 0; c < COLS_OF_LANE; ++c) {
                    ASTRAI_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        acc[r][c] += weight.value[i] * v[c][i];
                    }
                }
            }
        }
    }

    ASTRAI_DEVICE void attend() {
        const KeyRange range =
            RowSpan(params, schedule.q_len, kv.kv_len, first_row, Shape::ROWS).seen_by_some;
        load_q();
        for (int begin = range.begin; begin < range.end; begin += KEYS) {
            const uint32_t seen = find_key(begin + lane, range);
            __syncthreads();
            load_kv(params.k, params.head_dim, [&](int slot) { return kv.k_offset(slot, kv_head); });
            __syncthreads();
            weigh_keys(seen);
            __syncthreads();
            load_kv(params.v, params.value_dim, [&](int slot) { return kv.v_offset(slot, kv_head); });
            __syncthreads();
            accumulate_v();
        }
    }

    ASTRAI_DEVICE void store_rows(const Q& places) {
        T* out = static_cast<T*>(params.out) + places.out_base + q_head * params.out_stride_h;
        ASTRAI_UNROLL
        for (int r = 0; r < ROWS_OF_WARP; ++r) {
            const SoftmaxState state = {softmax[r].maximum, warp_sum(softmax[r].sum)};
            const float scale = inverse_sum(state.sum);
            const int row = row_of_warp(r);
            ASTRAI_UNROLL
            for (int c = 0; c < COLS_OF_LANE; ++c) {
                const int col = lane + c * WARP_SIZE;
                if (row < schedule.q_len && col < params.value_dim) {
                    store_global(out + row * params.out_stride_t + col, from_float<T>(acc[r][c] * scale));
                }
            }
            if (params.lse != nullptr && row < schedule.q_len && lane == 0) {
                store_global(params.lse + (places.first_token + row) * params.q_heads + q_head,
                             natural_lse(state.maximum, state.sum));
            }
        }
    }
};

}  // namespace prefill

// Grid (q tiles of the schedule, q_heads, Q_TILE / ROWS). Two blocks to a multiprocessor: left to itself
// ptxas aims higher and spills.
template <class T, int HEAD_DIM, class Q, class KV>
ASTRAI_GLOBAL((prefill::ScalarShape<T, HEAD_DIM>::THREADS), 2)
attn_prefill_split_q_kernel(const AttnParams params) {
    const Q schedule(params);
    if (!prefill::has_rows(schedule)) {
        return;
    }
    const int first_row = schedule.tile * Q_TILE + blockIdx.z * prefill::ScalarShape<T, HEAD_DIM>::ROWS;
    if (first_row >= schedule.q_len) {
        return;
    }
    const KV kv(params, schedule.batch);
    prefill::ScalarPrefill<T, HEAD_DIM, Q, KV> block(params, schedule, kv, first_row);
    block.attend();
    // Where the rows go is found again: kept, it would cost registers in the loop.
    block.store_rows(Q(params));
}

}  // namespace astrai
