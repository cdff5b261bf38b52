// From the softmax states of the warps of a block to its result: rows of out, or a partial result for the
// combine.
#pragma once

#include "csrc/kernels/attn_decode_block.cuh"
#include "csrc/kernels/attn_softmax.cuh"
#include "csrc/kernels/device.cuh"

namespace astrai {

// A softmax state over some keys: the maximum of their scores in base 2, and what exp2(score - maximum) sums
// to. A sum of 0 means that nothing was seen; a NaN among the scores shows in the sum alone.
struct SoftmaxState {
    float maximum, sum;
};

// What turns an un-normalised row over all keys that were seen into the result: the sink joins here, once.
// The combine of one split does the same arithmetic in the same order, so that the bits of a request do not
// depend on the number of splits.
struct FinalScale {
    float weight, inverse, lse;

    ASTRAI_DEVICE FinalScale(SoftmaxState state, float sink) {
        const float maximum = fmaxf(state.maximum, sink);
        const float base = softmax_base(maximum);
        weight = exp2f(state.maximum - base);
        const float sum = fmaf(state.sum, weight, exp2f(sink - base));
        inverse = inverse_sum(sum);
        lse = natural_lse(maximum, sum);
    }
    ASTRAI_DEVICE float operator()(float value) const { return value * weight * inverse; }
};

// Where the warps of a block leave their states: values [WARPS, ROWS, STRIDE], maximum and sum [WARPS, ROWS,
// 2].
template <int WARPS, int ROWS, int STRIDE>
struct WarpStates {
    static constexpr int NUM_VALUES = WARPS * ROWS * STRIDE;
    static constexpr int NUM_SCALARS = WARPS * ROWS * 2;
    Shared<float> values, scalars;

    ASTRAI_DEVICE void store_value(int warp, int row, int column, float value) const {
        values.store((warp * ROWS + row) * STRIDE + column, value);
    }
    ASTRAI_DEVICE float value(int warp, int row, int column) const {
        return values.load((warp * ROWS + row) * STRIDE + column);
    }
    ASTRAI_DEVICE void store_state(int warp, int row, SoftmaxState state) const {
        scalars.store((warp * ROWS + row) * 2, state.maximum);
        scalars.store((warp * ROWS + row) * 2 + 1, state.sum);
    }

    // State of a row over all warps, and what the values of each have to be multiplied by.
    ASTRAI_DEVICE SoftmaxState merge(int row, float (&weights)[WARPS]) const {
        SoftmaxState merged{-INFINITY, 0.0f};
        ASTRAI_UNROLL
        for (int warp = 0; warp < WARPS; ++warp) {
            weights[warp] = scalars.load((warp * ROWS + row) * 2);
            merged.maximum = fmaxf(merged.maximum, weights[warp]);
        }
        const float base = softmax_base(merged.maximum);
        ASTRAI_UNROLL
        for (int warp = 0; warp < WARPS; ++warp) {
            weights[warp] = exp2f(weights[warp] - base);
            merged.sum = fmaf(scalars.load((warp * ROWS + row) * 2 + 1), weights[warp], merged.sum);
        }
        return merged;
    }
};

ASTRAI_DEVICE void store_split_state(const AttnParams& params, int64_t part, SoftmaxState state) {
    store_global(params.ml_part + part * 2, state.maximum);
    store_global(params.ml_part + part * 2 + 1, state.sum);
}

// Index of the partial result of a head in o_part and ml_part.
template <class KV, int HEADS>
ASTRAI_DEVICE int64_t part_index(const DecodeBlock<KV, HEADS>& block, int q_head) {
    const AttnParams& params = block.params;
    return (static_cast<int64_t>(block.batch) * params.q_heads + q_head) * params.num_splits + block.split;
}

// What a split without keys leaves; its values are never read.
template <class KV, int HEADS>
ASTRAI_DEVICE void store_empty_split(const DecodeBlock<KV, HEADS>& block) {
    for (int row = threadIdx.x; row < block.num_heads; row += blockDim.x) {
        store_split_state(block.params, part_index(block, block.first_head + row), {-INFINITY, 0.0f});
    }
}

// Each warp takes rows, its lanes the columns. All states must be visible to all threads.
template <class T, class KV, int HEADS, int WARPS, int STRIDE>
ASTRAI_DEVICE void store_block_result(const DecodeBlock<KV, HEADS>& block,
                                      const WarpStates<WARPS, HEADS, STRIDE>& states) {
    const AttnParams& params = block.params;
    const int lane = threadIdx.x % WARP_SIZE;
    for (int row = threadIdx.x / WARP_SIZE; row < block.num_heads; row += WARPS) {
        const int q_head = block.first_head + row;
        float weights[WARPS];
        const SoftmaxState state = states.merge(row, weights);
        const bool is_final = params.num_splits == 1;
        const FinalScale scale(state, is_final ? sink_score(params, q_head) : -INFINITY);
        const int64_t part = part_index(block, q_head);
        T* out =
            static_cast<T*>(params.out) + block.batch * params.out_stride_b + q_head * params.out_stride_h;
        for (int column = lane; column < params.value_dim; column += WARP_SIZE) {
            float value = 0.0f;
            ASTRAI_UNROLL
            for (int warp = 0; warp < WARPS; ++warp) {
                value = fmaf(states.value(warp, row, column), weights[warp], value);
            }
            if (is_final) {
                store_global(out + column, from_float<T>(scale(value)));
            } else {
                store_global(params.o_part + part * params.value_dim + column, value);
            }
        }
        if (lane == 0 && !is_final) {
            store_split_state(params, part, state);
        }
        if (lane == 0 && is_final && params.lse != nullptr) {
            store_global(params.lse + static_cast<int64_t>(block.batch) * params.q_heads + q_head, scale.lse);
        }
    }
}

}  // namespace astrai
