// Arguments of the rotary kernel and of the joining of softmax states. Free of torch and of CUDA.
#pragma once

#include <cstdint>

#include "csrc/kernels/attn_common.h"

namespace astrai {

enum class Pairing : int { adjacent = 0, half = 1 };

// Rotate the first rotary_dim elements of every head of q and k; with a pool, store rotated k, and v, as well.
// Strides count elements; heads have a unit last stride. Tokens are [num_b, num_t].
struct RotaryParams {
    const void* q = nullptr;  // [num_b, num_t, q_heads, head_dim]
    const void* k = nullptr;  // [num_b, num_t, kv_heads, head_dim], or null
    const void* v = nullptr;  // [num_b, num_t, kv_heads, value_dim], with a pool only
    const float* freqs = nullptr;  // [num_b, num_t, rotary_dim / 2, 2]: cos, sin; the last two contiguous
    void* q_out = nullptr;  // may be q itself
    void* k_out = nullptr;  // may be k itself; null with a pool
    void* k_pool = nullptr;  // [num_slots, kv_heads, head_dim]
    void* v_pool = nullptr;  // [num_slots, kv_heads, value_dim]
    const int32_t* out_cache_loc = nullptr;  // [num_t]: a negative slot, or one not in the pool, is not written

    int64_t q_stride_b = 0, q_stride_t = 0, q_stride_h = 0;
    int64_t k_stride_b = 0, k_stride_t = 0, k_stride_h = 0;
    int64_t v_stride_t = 0, v_stride_h = 0;
    int64_t freqs_stride_b = 0, freqs_stride_t = 0;
    int64_t q_out_stride_b = 0, q_out_stride_t = 0, q_out_stride_h = 0;
    int64_t k_out_stride_b = 0, k_out_stride_t = 0, k_out_stride_h = 0;
    int64_t k_pool_stride_n = 0, k_pool_stride_h = 0;
    int64_t v_pool_stride_n = 0, v_pool_stride_h = 0;
    int64_t loc_stride = 0;

    int64_t num_slots = 0;
    int num_b = 0, num_t = 0, q_heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0, rotary_dim = 0;
};

// Join two states of attention over disjoint keys; a state whose lse is -inf has seen nothing and is not read.
struct MergeParams {
    const void* o_a = nullptr;      // [tokens, heads, head_dim], normalised
    const float* lse_a = nullptr;   // [tokens, heads], natural logarithm
    const void* o_b = nullptr;
    const float* lse_b = nullptr;
    void* out = nullptr;            // may be o_a or o_b
    float* lse = nullptr;           // [tokens, heads] contiguous
    int64_t o_a_stride_t = 0, o_a_stride_h = 0, lse_a_stride_t = 0, lse_a_stride_h = 0;
    int64_t o_b_stride_t = 0, o_b_stride_h = 0, lse_b_stride_t = 0, lse_b_stride_h = 0;
    int64_t out_stride_t = 0, out_stride_h = 0;
    int tokens = 0, heads = 0, head_dim = 0;
};

void rotary_emb(const RotaryParams& params, Dtype dtype, Pairing pairing, void* stream);
// o_b may have another dtype than o_a and out.
void merge_states(const MergeParams& params, Dtype dtype_a, Dtype dtype_b, void* stream);

}  // namespace astrai
