// Arguments of every attention kernel, and the entry points that take them. Free of torch and of CUDA.
#pragma once

#include <cstdint>

namespace astrai {

// Rows of q in one tile of q_tile_to_batch and q_tile_to_index.
constexpr int Q_TILE = 64;
// A window that reaches everything. Small enough that a position plus a window stays an int.
constexpr int WINDOW_MAX = 1 << 30;

enum class Dtype : int { f32 = 0, f16 = 1, bf16 = 2 };
enum class Variant : int { scalar = 0, mma = 1 };

// One call. Strides count elements. The last dimension of q, k, v, new_k, new_v and out has stride 1. What a call
// does not use is null or 0.
//
// Contiguous decode and prefill: request b has kv_len keys, and q_len rows that are its last positions.
// Paged: request b has kv_indptr[b + 1] - kv_indptr[b] keys; key p lies in slot
// req_to_token[req_pool_indices[b], p]; a slot that is negative or not in the pool, a position beyond the table and a
// request row that does not exist are masked and never read.
struct AttnParams {
    const void* q = nullptr;      // decode [batch, q_heads, head_dim], dense [batch, q_len, ...], packed [tokens, ...]
    void* k = nullptr;            // [batch, kv_len, kv_heads, head_dim] or pool [num_slots, kv_heads, head_dim]
    void* v = nullptr;            // the same with value_dim
    const void* new_k = nullptr;  // [batch, kv_heads, head_dim]: the last key of each request, to be stored
    const void* new_v = nullptr;  // [batch, kv_heads, value_dim]
    void* out = nullptr;          // shape of q with value_dim
    float* lse = nullptr;         // [rows of q, q_heads], natural logarithm
    float* o_part = nullptr;      // [batch, q_heads, num_splits, value_dim], not normalised
    float* ml_part = nullptr;     // [batch, q_heads, num_splits, 2]: maximum of the scores in base 2, sum

    const int32_t* req_to_token = nullptr;      // [num_reqs, context]
    const int32_t* req_pool_indices = nullptr;  // [batch]
    const int32_t* kv_indptr = nullptr;         // [batch + 1]
    const int32_t* qo_indptr = nullptr;         // [batch + 1]
    const int32_t* q_tile_to_batch = nullptr;   // [num_q_tiles]
    const int32_t* q_tile_to_index = nullptr;   // [num_q_tiles]

    const uint8_t* mask = nullptr;         // not 0 = keep; strided, or ragged: decode by kv_indptr, packed by mask_indptr
    const int64_t* mask_indptr = nullptr;  // [batch + 1]: prefix sum of q_len * kv_len, packed only
    const float* sinks = nullptr;          // [q_heads], natural logarithm

    int64_t q_stride_b = 0, q_stride_t = 0, q_stride_h = 0;
    int64_t k_stride_b = 0, k_stride_n = 0, k_stride_h = 0;
    int64_t v_stride_b = 0, v_stride_n = 0, v_stride_h = 0;
    int64_t new_k_stride_b = 0, new_k_stride_h = 0;
    int64_t new_v_stride_b = 0, new_v_stride_h = 0;
    int64_t out_stride_b = 0, out_stride_t = 0, out_stride_h = 0;
    int64_t table_stride_r = 0, table_stride_n = 0;
    int64_t mask_stride_b = 0, mask_stride_t = 0, mask_stride_n = 0;

    int batch = 0, q_heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
    int q_len = 0, kv_len = 0;         // contiguous
    int num_reqs = 0, context = 0;     // rows and columns of req_to_token
    int64_t num_slots = 0;             // of the pool
    int num_q_tiles = 0;               // packed
    int max_kv_len = 0;                // decode: keys from it on are not attended to
    int window_left = WINDOW_MAX;      // a row at position p sees keys p - left ...
    int window_right = WINDOW_MAX;     // ... to p + right; causal is 0
    int split_len = 0, num_splits = 1; // decode: keys of a split; set by the launcher
    float score_scale = 1.0f;
    float softcap = 0.0f;              // 0 is off, else scores are softcap * tanh(scores / softcap)
};

// Scratch that a decode call needs: 1 means none. A function of the shape alone.
int count_decode_splits(const AttnParams& params, Dtype dtype);

// Each runs one variant of its kernel on a stream (of type cudaStream_t, ignored on the host).
// Raise std::invalid_argument for what the variant has no kernel for, std::runtime_error for a failed launch.
void attn_decode(const AttnParams& params, Dtype dtype, Variant variant, void* stream);
void attn_prefill(const AttnParams& params, Dtype dtype, Variant variant, void* stream);
void attn_paged_decode(const AttnParams& params, Dtype dtype, Variant variant, void* stream);
void attn_paged_prefill(const AttnParams& params, Dtype dtype, Variant variant, void* stream);

}  // namespace astrai
