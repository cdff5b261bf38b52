// From run-time sizes and dtypes to template arguments.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "csrc/kernels/attn_common.h"
#include "csrc/kernels/device.cuh"

// Head dims that attention kernels are instantiated for, ascending; a call takes the smallest that holds its own.
#if !defined(ASTRAI_HEAD_DIMS)
#define ASTRAI_HEAD_DIMS 32, 64, 96, 128, 192, 256
#endif

namespace astrai {

template <class T>
struct Type {
    using type = T;
};

namespace detail {

template <class Run>
void run_head_dim(int head_dim, Run&&) {
    throw std::invalid_argument("head_dim: wanted at most the largest instantiated one, got " +
                                std::to_string(head_dim));
}

template <int DIM, int... LARGER, class Run>
void run_head_dim(int head_dim, Run&& run) {
    if (head_dim <= DIM) {
        run(std::integral_constant<int, DIM>{});
    } else {
        run_head_dim<LARGER...>(head_dim, run);
    }
}

}  // namespace detail

// run(std::integral_constant<int, HEAD_DIM>) with the smallest instantiated HEAD_DIM that holds both.
template <class Run>
void dispatch_head_dim(int head_dim, int value_dim, Run&& run) {
    detail::run_head_dim<ASTRAI_HEAD_DIMS>(head_dim > value_dim ? head_dim : value_dim, run);
}

// run(Type<T>) for float, f16 or bf16.
template <class Run>
void dispatch_dtype(Dtype dtype, Run&& run) {
    switch (dtype) {
        case Dtype::f32: return run(Type<float>{});
        case Dtype::f16: return run(Type<f16>{});
        case Dtype::bf16: return run(Type<bf16>{});
    }
    throw std::invalid_argument("dtype: wanted float32, float16 or bfloat16");
}

// run(Type<T>) for the dtypes that tensor cores multiply here, f16 or bf16.
template <class Run>
void dispatch_mma_dtype(Dtype dtype, Run&& run) {
    switch (dtype) {
        case Dtype::f16: return run(Type<f16>{});
        case Dtype::bf16: return run(Type<bf16>{});
        case Dtype::f32: break;
    }
    throw std::invalid_argument("dtype: wanted float16 or bfloat16 for the variant mma, got float32; use scalar");
}

}  // namespace astrai
