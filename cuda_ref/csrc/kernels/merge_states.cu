// Joins two states of attention over disjoint keys, one thread an element.
#include <cmath>

#include "csrc/kernels/attn_dispatchers.cuh"
#include "csrc/kernels/rotary_common.h"

namespace astrai {

constexpr int MERGE_THREADS = 256;

// How much of each state goes into the joint one, and the logarithm of the joint sum.
struct MergeWeights {
    float a, b, lse;
};

ASTRAI_DEVICE MergeWeights weigh_states(float lse_a, float lse_b) {
    const float largest = fmaxf(lse_a, lse_b);
    if (largest == -INFINITY) {
        return {0.0f, 0.0f, -INFINITY};
    }
    const float a = expf(lse_a - largest), b = expf(lse_b - largest);
    return {a / (a + b), b / (a + b), largest + logf(a + b)};
}

template <class A, class B>
ASTRAI_GLOBAL(MERGE_THREADS) merge_states_kernel(MergeParams p) {
    const int64_t count = static_cast<int64_t>(p.tokens) * p.heads * p.head_dim;
    const int64_t step = static_cast<int64_t>(gridDim.x) * MERGE_THREADS;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * MERGE_THREADS + threadIdx.x; i < count; i += step) {
        const int64_t d = i % p.head_dim, row = i / p.head_dim;
        const int64_t head = row % p.heads, token = row / p.heads;
        const float lse_a = load_global(p.lse_a + token * p.lse_a_stride_t + head * p.lse_a_stride_h);
        const float lse_b = load_global(p.lse_b + token * p.lse_b_stride_t + head * p.lse_b_stride_h);
        const MergeWeights weights = weigh_states(lse_a, lse_b);
        float sum = 0.0f;
        // The values of a state without keys may be anything, and 0 * NaN is NaN.
        if (lse_a != -INFINITY) {
            const A* a = static_cast<const A*>(p.o_a) + token * p.o_a_stride_t + head * p.o_a_stride_h;
            sum += weights.a * to_float(load_global(a + d));
        }
        if (lse_b != -INFINITY) {
            const B* b = static_cast<const B*>(p.o_b) + token * p.o_b_stride_t + head * p.o_b_stride_h;
            sum += weights.b * to_float(load_global(b + d));
        }
        A* out = static_cast<A*>(p.out) + token * p.out_stride_t + head * p.out_stride_h;
        store_global(out + d, from_float<A>(sum));
        if (d == 0) {
            store_global(p.lse + row, weights.lse);
        }
    }
}

void merge_states(const MergeParams& params, Dtype dtype_a, Dtype dtype_b, void* stream) {
    const int64_t count = static_cast<int64_t>(params.tokens) * params.heads * params.head_dim;
    const int64_t num_blocks = (count + MERGE_THREADS - 1) / MERGE_THREADS;
    constexpr int64_t MAX_BLOCKS = 2147483647;
    const dim3 grid(static_cast<unsigned>(num_blocks < MAX_BLOCKS ? num_blocks : MAX_BLOCKS), 1, 1);
    dispatch_dtype(dtype_a, [&](auto type_a) {
        dispatch_dtype(dtype_b, [&](auto type_b) {
            using A = typename decltype(type_a)::type;
            using B = typename decltype(type_b)::type;
            launch(ASTRAI_NAMED(merge_states_kernel<A, B>), grid, MERGE_THREADS, 0,
                   static_cast<Stream>(stream), params);
        });
    });
}

}  // namespace astrai
