// Entry point of the rotary kernel: dtype, pairing and width of the accesses become template arguments.
#include <initializer_list>

#include "csrc/kernels/attn_dispatchers.cuh"
#include "csrc/kernels/rotary_rows.cuh"

namespace astrai {

namespace {

// Whether every row of x and of what comes out of it starts at a multiple of 16 bytes.
bool are_rows_aligned(const void* base, std::initializer_list<int64_t> strides, int itemsize) {
    bool is_aligned = reinterpret_cast<uintptr_t>(base) % 16 == 0;
    for (const int64_t stride : strides) {
        is_aligned = is_aligned && stride * itemsize % 16 == 0;
    }
    return is_aligned;
}

// Whether rows can be cut into runs of 16 bytes that start at multiples of 16 bytes.
bool can_move_16_bytes(const RotaryParams& p, int itemsize) {
    const int run = 16 / itemsize;
    const int pairs = p.rotary_dim / 2;
    return pairs % run == 0 && (p.head_dim - p.rotary_dim) % run == 0 && p.value_dim % run == 0 &&
           are_rows_aligned(p.q, {p.q_stride_b, p.q_stride_t, p.q_stride_h}, itemsize) &&
           are_rows_aligned(p.k, {p.k_stride_b, p.k_stride_t, p.k_stride_h}, itemsize) &&
           are_rows_aligned(p.v, {p.v_stride_t, p.v_stride_h}, itemsize) &&
           are_rows_aligned(p.q_out, {p.q_out_stride_b, p.q_out_stride_t, p.q_out_stride_h}, itemsize) &&
           are_rows_aligned(p.k_out, {p.k_out_stride_b, p.k_out_stride_t, p.k_out_stride_h}, itemsize) &&
           are_rows_aligned(p.k_pool, {p.k_pool_stride_n, p.k_pool_stride_h}, itemsize) &&
           are_rows_aligned(p.v_pool, {p.v_pool_stride_n, p.v_pool_stride_h}, itemsize) &&
           are_rows_aligned(p.freqs, {p.freqs_stride_b, p.freqs_stride_t}, sizeof(float));
}

template <class T, Pairing PAIRING, int RUN>
void launch_rotary(const RotaryParams& params, void* stream) {
    const RotaryLaunch call{params, count_row_units(params, RUN), count_token_rows(params)};
    const int64_t num_units =
        static_cast<int64_t>(params.num_b) * params.num_t * call.token_rows * call.row_units;
    const int64_t num_blocks = (num_units + ROTARY_THREADS - 1) / ROTARY_THREADS;
    constexpr int64_t MAX_BLOCKS = 2147483647;
    const dim3 grid(static_cast<unsigned>(num_blocks < MAX_BLOCKS ? num_blocks : MAX_BLOCKS), 1, 1);
    launch(ASTRAI_NAMED(rotary_kernel<T, PAIRING, RUN>), grid, ROTARY_THREADS, 0, static_cast<Stream>(stream),
           call);
}

template <class T, Pairing PAIRING>
void dispatch_run(const RotaryParams& params, void* stream) {
    if (can_move_16_bytes(params, sizeof(T))) {
        launch_rotary<T, PAIRING, 16 / sizeof(T)>(params, stream);
    } else {
        launch_rotary<T, PAIRING, 1>(params, stream);
    }
}

}  // namespace

void rotary_emb(const RotaryParams& params, Dtype dtype, Pairing pairing, void* stream) {
    dispatch_dtype(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        switch (pairing) {
            case Pairing::adjacent: return dispatch_run<T, Pairing::adjacent>(params, stream);
            case Pairing::half: return dispatch_run<T, Pairing::half>(params, stream);
        }
        throw std::invalid_argument("pairing: wanted adjacent or half");
    });
}

}  // namespace astrai
