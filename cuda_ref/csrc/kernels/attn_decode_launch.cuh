// How decode is cut into splits, and the launch of its kernels for one source of keys.
#pragma once

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>

#include "csrc/kernels/attn_common.h"
#include "csrc/kernels/attn_decode_combine.cuh"
#include "csrc/kernels/attn_decode_split_kv.cuh"
#include "csrc/kernels/attn_decode_split_kv_mma.cuh"
#include "csrc/kernels/attn_dispatchers.cuh"
#include "csrc/kernels/device.cuh"

namespace astrai {
namespace decode {

// Keys of a split. Partial results cost 8 G bytes a column, written and read, against 2 e of K and V a key:
// from 128 G / e keys on they add at most 1/32 to the traffic. Fewer than 256 would not pay for the start of
// a block. Of heads and dtype alone, so that the bits of a request do not depend on its batch.
inline int choose_split_len(int q_heads, int kv_heads, Dtype dtype) {
    const int element_size = dtype == Dtype::f32 ? 4 : 2;
    const int enough = 128 * (q_heads / kv_heads) / element_size;
    return std::max(256, (enough + 127) / 128 * 128);
}

// Contiguous calls give kv_len, paged ones max_kv_len.
inline int longest_kv_len(const AttnParams& params) { return std::max(params.kv_len, params.max_kv_len); }

inline int count_splits(const AttnParams& params, int split_len) {
    return static_cast<int>(
        std::max<int64_t>(1, (static_cast<int64_t>(longest_kv_len(params)) + split_len - 1) / split_len));
}

inline void check(bool is_ok, const std::string& message) {
    if (!is_ok) {
        throw std::invalid_argument(message);
    }
}

inline void check_shape(const AttnParams& params) {
    check(params.kv_heads > 0, "kv_heads: wanted at least 1, got " + std::to_string(params.kv_heads));
    check(params.q_heads % params.kv_heads == 0,
          "q_heads: wanted a multiple of kv_heads, " + std::to_string(params.kv_heads) + ", got " +
              std::to_string(params.q_heads) + "; repeat or drop heads");
    check(params.head_dim > 0 && params.head_dim % RUN == 0,
          "head_dim: wanted a positive multiple of 8, got " + std::to_string(params.head_dim) +
              "; pad q and k with zeros");
    check(params.value_dim > 0 && params.value_dim % RUN == 0,
          "value_dim: wanted a positive multiple of 8, got " + std::to_string(params.value_dim) + "; pad v");
    check((params.new_k == nullptr) == (params.new_v == nullptr),
          "new_k: wanted together with new_v, got one of them; pass both or none");
}

inline void check_scratch(const AttnParams& params) {
    const bool needs_scratch = params.num_splits > 1 && params.batch > 0;
    check(!needs_scratch || (params.o_part != nullptr && params.ml_part != nullptr),
          "o_part: wanted with ml_part for " + std::to_string(params.num_splits) +
              " splits, got null; allocate both by count_decode_splits");
}

// A stride along a single element leads nowhere.
inline int64_t used_stride(int64_t extent, int64_t stride) { return extent > 1 ? stride : 0; }

inline void check_mma_rows(const char* name, const void* data, int64_t stride_a, int64_t stride_b,
                           int64_t stride_c) {
    if (!has_aligned_rows(data, stride_a, stride_b, stride_c, 2)) {
        throw std::invalid_argument(std::string(name) +
                                    ": wanted rows that start at multiples of 16 bytes for the variant "
                                    "mma, got an address or strides that are not; use the variant scalar");
    }
}

// Tensor cores take rows in pieces of 16 bytes.
inline void check_mma_alignment(const AttnParams& p) {
    const int64_t keys = p.kv_indptr == nullptr ? p.kv_len : p.num_slots;
    const auto along_batch = [&p](int64_t stride) { return used_stride(p.batch, stride); };
    const auto along_keys = [keys](int64_t stride) { return used_stride(keys, stride); };
    const auto along_q_heads = [&p](int64_t stride) { return used_stride(p.q_heads, stride); };
    const auto along_kv_heads = [&p](int64_t stride) { return used_stride(p.kv_heads, stride); };
    check_mma_rows("q", p.q, along_batch(p.q_stride_b), along_q_heads(p.q_stride_h), 0);
    check_mma_rows("k", p.k, along_batch(p.k_stride_b), along_keys(p.k_stride_n),
                   along_kv_heads(p.k_stride_h));
    check_mma_rows("v", p.v, along_batch(p.v_stride_b), along_keys(p.v_stride_n),
                   along_kv_heads(p.v_stride_h));
    check_mma_rows("new_k", p.new_k, along_batch(p.new_k_stride_b), along_kv_heads(p.new_k_stride_h), 0);
    check_mma_rows("new_v", p.new_v, along_batch(p.new_v_stride_b), along_kv_heads(p.new_v_stride_h), 0);
    check_mma_rows("out", p.out, along_batch(p.out_stride_b), along_q_heads(p.out_stride_h), 0);
}

// As DecodeBlock reads it.
template <int HEADS>
dim3 choose_grid(const AttnParams& p) {
    const int64_t tiles = (p.q_heads / p.kv_heads + HEADS - 1) / HEADS;
    const int64_t blocks = tiles * p.kv_heads * p.batch;
    check(blocks <= INT_MAX, "batch: wanted at most 2^31 - 1 blocks of requests and heads, got " +
                                 std::to_string(blocks) + "; split the batch");
    check(p.num_splits <= 65535, "max_kv_len: wanted at most 65535 splits of " + std::to_string(p.split_len) +
                                     " keys, got " + std::to_string(p.num_splits) + "; shorten the context");
    return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.num_splits));
}

template <class KV>
void run_scalar(const AttnParams& params, Dtype dtype, Stream stream) {
    dispatch_dtype(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        dispatch_head_dim(params.head_dim, params.value_dim, [&](auto dim) {
            constexpr int HEAD_DIM = decltype(dim)::value;
            using Shape = ScalarDecodeShape<T, HEAD_DIM>;
            launch(ASTRAI_NAMED(attn_decode_split_kv<T, HEAD_DIM, KV>), choose_grid<Shape::HEADS>(params),
                   Shape::THREADS, Shape::SHARED_BYTES, stream, params);
        });
    });
}

template <class KV>
void run_mma(const AttnParams& params, Dtype dtype, Stream stream) {
#if defined(ASTRAI_NO_MMA)
    check(false, "variant: wanted scalar, got mma, which a build with ASTRAI_NO_MMA lacks; it needs sm_80");
#else
    dispatch_mma_dtype(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        check_mma_alignment(params);
        dispatch_head_dim(params.head_dim, params.value_dim, [&](auto dim) {
            constexpr int HEAD_DIM = decltype(dim)::value;
            using Shape = MmaDecodeShape<HEAD_DIM>;
            launch(ASTRAI_NAMED(attn_decode_split_kv_mma<T, HEAD_DIM, KV>), choose_grid<Shape::HEADS>(params),
                   Shape::THREADS, Shape::SHARED_BYTES, stream, params);
        });
    });
#endif
}

inline void combine(const AttnParams& params, Dtype dtype, Stream stream) {
    const int64_t rows = static_cast<int64_t>(params.batch) * params.q_heads;
    check(rows <= INT_MAX, "batch: wanted at most 2^31 - 1 requests times q heads, got " +
                               std::to_string(rows) + "; split the batch");
    dispatch_dtype(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        launch(ASTRAI_NAMED(attn_decode_combine<T>), dim3(static_cast<unsigned>(rows)), CombineShape::THREADS,
               CombineShape::shared_bytes(params.value_dim), stream, params);
    });
}

// Decode over one source of keys; num_splits and split_len of the parameters are set here.
template <class KV>
void run(AttnParams params, Dtype dtype, Variant variant, void* stream) {
    check_shape(params);
    params.split_len = choose_split_len(params.q_heads, params.kv_heads, dtype);
    params.max_kv_len = longest_kv_len(params);
    params.num_splits = count_splits(params, params.split_len);
    check_scratch(params);
    if (variant == Variant::mma) {
        run_mma<KV>(params, dtype, static_cast<Stream>(stream));
    } else {
        run_scalar<KV>(params, dtype, static_cast<Stream>(stream));
    }
    if (params.num_splits > 1) {
        combine(params, dtype, static_cast<Stream>(stream));
    }
}

}  // namespace decode
}  // namespace astrai
