// Launch of prefill kernels, the same for both pairs of a Q schedule and a KV source.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "csrc/kernels/attn_dispatchers.cuh"
#include "csrc/kernels/attn_entry_utils.cuh"
#include "csrc/kernels/attn_prefill_split_q.cuh"
#if !defined(ASTRAI_NO_MMA)
#include "csrc/kernels/attn_prefill_split_q_mma.cuh"
#endif

namespace astrai {
namespace prefill {

// Blocks along x and y; throws where a grid has no room for them.
inline dim3 make_grid(int64_t num_tiles, int q_heads, int num_parts) {
    if (q_heads > 65535) {
        throw std::invalid_argument("q: wanted at most 65535 heads, got " + std::to_string(q_heads) +
                                    "; split them");
    }
    if (num_tiles > std::numeric_limits<int>::max()) {
        throw std::invalid_argument("q: wanted fewer than 2**31 tiles of " + std::to_string(Q_TILE) +
                                    " rows, got " + std::to_string(num_tiles) + "; split the batch");
    }
    return dim3(static_cast<unsigned>(num_tiles), q_heads, num_parts);
}

// Tensor cores take rows in pieces of 16 bytes. Packed rows and slots lie along one dimension; the other has
// one element.
template <class Q, class KV>
void check_aligned(const AttnParams& p) {
    constexpr int64_t MANY = std::numeric_limits<int64_t>::max();
    const int64_t requests_of_q = Q::IS_PACKED ? 1 : p.batch, rows = Q::IS_PACKED ? MANY : p.q_len;
    const int64_t requests_of_kv = KV::IS_PAGED ? 1 : p.batch, keys = KV::IS_PAGED ? p.num_slots : p.kv_len;
    check_rows_aligned("q", p.q, {requests_of_q, p.q_stride_b}, {rows, p.q_stride_t},
                       {p.q_heads, p.q_stride_h});
    check_rows_aligned("k", p.k, {requests_of_kv, p.k_stride_b}, {keys, p.k_stride_n},
                       {p.kv_heads, p.k_stride_h});
    check_rows_aligned("v", p.v, {requests_of_kv, p.v_stride_b}, {keys, p.v_stride_n},
                       {p.kv_heads, p.v_stride_h});
    check_rows_aligned("out", p.out, {requests_of_q, p.out_stride_b}, {rows, p.out_stride_t},
                       {p.q_heads, p.out_stride_h});
}

template <class Q, class KV>
void launch_scalar(const AttnParams& params, Dtype dtype, int64_t num_tiles, Stream stream) {
    dispatch_dtype(dtype, [&](auto type) {
        dispatch_head_dim(params.head_dim, params.value_dim, [&](auto head_dim) {
            using T = typename decltype(type)::type;
            constexpr int HEAD_DIM = decltype(head_dim)::value;
            using Shape = ScalarShape<T, HEAD_DIM>;
            const dim3 grid = make_grid(num_tiles, params.q_heads, Q_TILE / Shape::ROWS);
            launch(ASTRAI_NAMED(attn_prefill_split_q_kernel<T, HEAD_DIM, Q, KV>), grid, Shape::THREADS,
                   Shape::SHARED_BYTES, stream, params);
        });
    });
}

template <class Q, class KV>
void launch_mma([[maybe_unused]] const AttnParams& params, [[maybe_unused]] Dtype dtype,
                [[maybe_unused]] int64_t num_tiles, [[maybe_unused]] Stream stream) {
#if defined(ASTRAI_NO_MMA)
    throw std::invalid_argument("variant: mma needs sm_80 or later, and this build has none; use scalar");
#else
    check_aligned<Q, KV>(params);
    dispatch_mma_dtype(dtype, [&](auto type) {
        dispatch_head_dim(params.head_dim, params.value_dim, [&](auto head_dim) {
            using T = typename decltype(type)::type;
            constexpr int HEAD_DIM = decltype(head_dim)::value;
            using Shape = MmaShape<T, HEAD_DIM>;
            launch(ASTRAI_NAMED(attn_prefill_split_q_mma_kernel<T, HEAD_DIM, Q, KV>),
                   make_grid(num_tiles, params.q_heads, 1), Shape::THREADS, Shape::SHARED_BYTES, stream,
                   params);
        });
    });
#endif
}

template <class Q, class KV>
void launch_variant(const AttnParams& params, Dtype dtype, Variant variant, int64_t num_tiles, void* stream) {
    check_heads_and_dims(params);
    switch (variant) {
        case Variant::scalar:
            return launch_scalar<Q, KV>(params, dtype, num_tiles, static_cast<Stream>(stream));
        case Variant::mma: return launch_mma<Q, KV>(params, dtype, num_tiles, static_cast<Stream>(stream));
    }
    throw std::invalid_argument("variant: wanted scalar or mma");
}

}  // namespace prefill
}  // namespace astrai
