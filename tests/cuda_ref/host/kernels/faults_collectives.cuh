// Kernels that keep the rules of barriers, shuffles and votes, or break one if is_broken; see
// faults_shared.cuh.
#pragma once

#include "faults_shared.cuh"

namespace astrai {
namespace mini {

ASTRAI_GLOBAL(64) barrier_in_two_branches(Args args) {
    if (args.is_broken && threadIdx.x >= 32) {
        __syncthreads();  // FAULT barrier_in_two_branches
    } else {
        __syncthreads();  // OTHER barrier_in_two_branches
    }
}

ASTRAI_GLOBAL(64) barrier_after_an_exit(Args args) {
    if (args.is_broken && threadIdx.x == 0) {
        return;
    }
    __syncthreads();  // FAULT barrier_after_an_exit
}

ASTRAI_GLOBAL(64) exit_before_a_barrier(Args args) {
    if (args.is_broken && threadIdx.x == 40) {
        return;
    }
    __syncthreads();  // FAULT exit_before_a_barrier
}

ASTRAI_GLOBAL(64) shuffle_without_a_lane(Args args) {
    float x = 1.0f;
    if (!args.is_broken || threadIdx.x != 7) {
        x = __shfl_xor_sync(FULL_WARP, x, 1);  // FAULT shuffle_without_a_lane
    }
    keep(args, x);
}

ASTRAI_GLOBAL(64) shuffle_after_an_exit(Args args) {
    if (args.is_broken && threadIdx.x == 0) {
        return;
    }
    keep(args, __shfl_xor_sync(FULL_WARP, 1.0f, 1));  // FAULT shuffle_after_an_exit
}

ASTRAI_GLOBAL(64) shuffle_against_barrier(Args args) {
    float x = 1.0f;
    if (!args.is_broken || threadIdx.x >= 4) {
        x = __shfl_xor_sync(FULL_WARP, x, 4);  // OTHER shuffle_against_barrier
    }
    __syncthreads();  // FAULT shuffle_against_barrier
    keep(args, x);
}

ASTRAI_GLOBAL(64) shuffle_and_vote(Args args) {
    const bool odd = args.is_broken && threadIdx.x % 2 == 1;
    keep(args, odd ? __any_sync(FULL_WARP, 1) : __shfl_xor_sync(FULL_WARP, 1, 0));  // FAULT shuffle_and_vote
}

ASTRAI_GLOBAL(64) two_shuffles(Args args) {
    if (args.is_broken && threadIdx.x % 2 == 1) {
        keep(args, __shfl_xor_sync(FULL_WARP, 1.0f, 1));  // FAULT two_shuffles
    } else {
        keep(args, __shfl_xor_sync(FULL_WARP, 1.0f, 0));  // OTHER two_shuffles
    }
}

ASTRAI_GLOBAL(64) shuffle_with_two_masks(Args args) {
    const unsigned mask = args.is_broken && threadIdx.x >= 16 ? 0xfffffffeu : FULL_WARP;
    keep(args, __shfl_xor_sync(mask, 1.0f, 0));  // FAULT shuffle_with_two_masks
}

// Lane 0 waits for lane 1, that for 2, and that for 0.
ASTRAI_GLOBAL(32) shuffles_in_a_ring(Args args) {
    if (threadIdx.x < 3) {
        const unsigned mask = args.is_broken ? (threadIdx.x == 2 ? 0x5u : 0x3u << threadIdx.x) : 0x7u;
        __syncwarp(mask);  // FAULT shuffles_in_a_ring
    }
}

ASTRAI_GLOBAL(64) mask_without_the_caller(Args args) {
    const unsigned mask = args.is_broken ? 0xffffffdfu : FULL_WARP;
    keep(args, __shfl_xor_sync(mask, 1.0f, 0));  // FAULT mask_without_the_caller
}

ASTRAI_GLOBAL(64) shuffle_from_outside(Args args) {
    if (threadIdx.x < 32) {
        const unsigned mask = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
        keep(args, __shfl_xor_sync(mask, 1.0f, args.is_broken ? 16 : 8));  // FAULT shuffle_from_outside
    }
}

ASTRAI_GLOBAL(64) shuffle_of_odd_width(Args args) {
    keep(args, __shfl_down_sync(FULL_WARP, 1.0f, 1, args.is_broken ? 12 : 16));  // FAULT shuffle_of_odd_width
}

// Tests launch it with 32 threads, and with 40.
ASTRAI_GLOBAL(64) vote_of_part_of_a_warp(Args args) {
    keep(args, static_cast<float>(__any_sync(FULL_WARP, 1)));  // FAULT vote_of_part_of_a_warp
}

}  // namespace mini
}  // namespace astrai
