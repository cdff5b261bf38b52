// What entry points ask of their parameters. Messages start with the name of the argument.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "csrc/kernels/attn_common.h"

namespace astrai {

inline void check_heads_and_dims(const AttnParams& params) {
    if (params.kv_heads < 1 || params.q_heads % params.kv_heads != 0) {
        throw std::invalid_argument("q_heads: wanted a multiple of kv_heads, which is at least 1, got " +
                                    std::to_string(params.q_heads) + " and " +
                                    std::to_string(params.kv_heads) + "; repeat or drop heads");
    }
    const auto check_dim = [](const char* name, int dim) {
        if (dim < 1 || dim % 8 != 0) {
            throw std::invalid_argument(std::string(name) + ": wanted a positive multiple of 8, got " +
                                        std::to_string(dim) + "; pad the rows");
        }
    };
    check_dim("head_dim", params.head_dim);
    check_dim("value_dim", params.value_dim);
}

// A stride, and how many elements it leads along; along a single one it leads nowhere.
struct Extent {
    int64_t count, stride;
};

// Throws unless every row of 16-bit elements starts at a multiple of 16 bytes.
inline void check_rows_aligned(const char* name, const void* start, Extent a, Extent b, Extent c) {
    if (reinterpret_cast<uintptr_t>(start) % 16 != 0) {
        throw std::invalid_argument(std::string(name) +
                                    ": wanted an address that is a multiple of 16 bytes for the " +
                                    "variant mma; use the variant scalar, or copy the tensor");
    }
    for (const Extent& extent : {a, b, c}) {
        if (extent.count > 1 && extent.stride % 8 != 0) {
            throw std::invalid_argument(std::string(name) +
                                        ": wanted strides that are multiples of 8 for the " +
                                        "variant mma, got " + std::to_string(extent.stride) +
                                        "; use the variant scalar, or copy the tensor");
        }
    }
}

}  // namespace astrai
