// Reductions over the lanes of a warp; every lane gets the result.
#pragma once

#include "csrc/kernels/device.cuh"

namespace astrai {

ASTRAI_DEVICE float warp_max(float x) {
    ASTRAI_UNROLL
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2) {
        x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance));
    }
    return x;
}

ASTRAI_DEVICE float warp_sum(float x) {
    ASTRAI_UNROLL
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(FULL_WARP, x, distance);
    }
    return x;
}

// Over the four lanes that hold one row of an MMA accumulator.
ASTRAI_DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

ASTRAI_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

}  // namespace astrai
