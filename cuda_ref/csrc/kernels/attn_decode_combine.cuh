// Joins the partial results of the splits of a request into its result.
#pragma once

#include "csrc/kernels/attn_common.h"
#include "csrc/kernels/attn_decode_merge.cuh"
#include "csrc/kernels/attn_softmax.cuh"
#include "csrc/kernels/attn_warp_utils.cuh"
#include "csrc/kernels/device.cuh"

namespace astrai {

// Warp w takes splits w, w + WARPS, ..., and the warps are summed in order: who adds what does not depend on
// the number of splits, and a split that has seen nothing adds nothing, so neither do the bits.
struct CombineShape {
    static constexpr int WARPS = 8;
    static constexpr int THREADS = WARPS * WARP_SIZE;

    static int shared_bytes(int value_dim) {
        return static_cast<int>(sizeof(float)) * WARPS * (value_dim + 1);
    }
};

namespace detail {

// Highest score of all splits; every warp finds it for itself.
ASTRAI_DEVICE float highest_score(const AttnParams& params, int64_t row) {
    float maximum = -INFINITY;
    for (int split = threadIdx.x % WARP_SIZE; split < params.num_splits; split += WARP_SIZE) {
        maximum = fmaxf(maximum, load_global(params.ml_part + (row * params.num_splits + split) * 2));
    }
    return warp_max(maximum);
}

// What the splits of this warp add up to: COLUMNS columns of the lane, the first at column, and the softmax
// sum. BATCH splits are in flight at once: with one, a long context would wait for memory split after split.
struct WarpSum {
    static constexpr int COLUMNS = 4, BATCH = 4;
    float values[COLUMNS] = {};
    float sum;

    ASTRAI_DEVICE WarpSum(const AttnParams& params, int64_t row, int column, float base, float initial_sum)
        : sum(initial_sum) {
        const int warp = threadIdx.x / WARP_SIZE;
        for (int split = warp; split < params.num_splits; split += BATCH * CombineShape::WARPS) {
            float weights[BATCH], parts[BATCH][COLUMNS];
            ASTRAI_UNROLL
            for (int i = 0; i < BATCH; ++i) {
                weights[i] = 0.0f;
                load_split(params, row, split + i * CombineShape::WARPS, column, base, weights[i], parts[i]);
            }
            ASTRAI_UNROLL
            for (int i = 0; i < BATCH; ++i) {
                ASTRAI_UNROLL
                for (int j = 0; j < COLUMNS; ++j) {
                    values[j] = fmaf(parts[i][j], weights[i], values[j]);
                }
            }
        }
    }

private:
    // A split that does not exist, or has seen nothing, adds nothing and is not read.
    ASTRAI_DEVICE void load_split(const AttnParams& params, int64_t row, int split, int column, float base,
                                  float& weight, float (&parts)[COLUMNS]) {
        const int64_t part = row * params.num_splits + split;
        const float split_sum = split < params.num_splits ? load_global(params.ml_part + part * 2 + 1) : 0.0f;
        if (split_sum != 0.0f) {
            weight = exp2f(load_global(params.ml_part + part * 2) - base);
            sum = fmaf(split_sum, weight, sum);
        }
        ASTRAI_UNROLL
        for (int j = 0; j < COLUMNS; ++j) {
            const bool keep = split_sum != 0.0f && column + j * WARP_SIZE < params.value_dim;
            parts[j] =
                keep ? load_global(params.o_part + part * params.value_dim + column + j * WARP_SIZE) : 0.0f;
        }
    }
};

}  // namespace detail

// Grid: one block per request and query head.
template <class T>
ASTRAI_GLOBAL(CombineShape::THREADS)
attn_decode_combine(const AttnParams params) {
    constexpr int WARPS = CombineShape::WARPS;
    const int64_t row = blockIdx.x;
    const int q_head = static_cast<int>(row % params.q_heads);
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int value_dim = params.value_dim;
    Shared<float> values = shared_array<float>(0, WARPS * value_dim);
    Shared<float> sums = shared_array<float>(WARPS * value_dim * static_cast<int>(sizeof(float)), WARPS);

    const float sink = sink_score(params, q_head);
    const float maximum = fmaxf(detail::highest_score(params, row), sink);
    const float base = softmax_base(maximum);
    for (int column = lane; column - lane < value_dim; column += detail::WarpSum::COLUMNS * WARP_SIZE) {
        const detail::WarpSum total(params, row, column, base, warp == 0 ? exp2f(sink - base) : 0.0f);
        ASTRAI_UNROLL
        for (int j = 0; j < detail::WarpSum::COLUMNS; ++j) {
            if (column + j * WARP_SIZE < value_dim) {
                values.store(warp * value_dim + column + j * WARP_SIZE, total.values[j]);
            }
        }
        if (column == 0) {
            sums.store(warp, total.sum);
        }
    }
    __syncthreads();

    float sum = 0.0f;
    ASTRAI_UNROLL
    for (int i = 0; i < WARPS; ++i) {
        sum += sums.load(i);
    }
    T* out = static_cast<T*>(params.out) + row / params.q_heads * params.out_stride_b +
             q_head * params.out_stride_h;
    for (int column = threadIdx.x; column < value_dim; column += CombineShape::THREADS) {
        float value = 0.0f;
        ASTRAI_UNROLL
        for (int i = 0; i < WARPS; ++i) {
            value += values.load(i * value_dim + column);
        }
        store_global(out + column, from_float<T>(value * inverse_sum(sum)));
    }
    if (threadIdx.x == 0 && params.lse != nullptr) {
        store_global(params.lse + row, natural_lse(maximum, sum));
    }
}

}  // namespace astrai
