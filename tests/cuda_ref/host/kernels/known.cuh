// Textbook kernels.
#pragma once

#include "csrc/kernels/attn_warp_utils.cuh"
#include "args.cuh"

namespace astrai {
namespace mini {

// out[block] = sum of n elements of x.
ASTRAI_GLOBAL(256) sum_kernel(Args args) {
    const Shared<float> totals = shared_array<float>(0, 8);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < args.n; i += 256) {
        sum += load_global(args.x_as<float>() + blockIdx.x * args.n + i);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        totals.store(warp, sum);
    }
    __syncthreads();
    if (warp == 0) {
        sum = warp_sum(lane < 8 ? totals.load(lane) : 0.0f);
        if (lane == 0) {
            store_global(args.out_as<float>() + blockIdx.x, sum);
        }
    }
}

// out [n, n] = x^T, 32 x 32 elements a block, rows of the tile one element apart from the banks.
ASTRAI_GLOBAL(256) transpose_kernel(Args args) {
    const Shared<float> tile = shared_array<float>(0, 32 * 33);
    const int col = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < 32; row += 8) {
        const int64_t offset = static_cast<int64_t>(blockIdx.y * 32 + row) * args.n + blockIdx.x * 32 + col;
        tile.store(row * 33 + col, load_global(args.x_as<float>() + offset));
    }
    __syncthreads();
    for (int row = threadIdx.x / 32; row < 32; row += 8) {
        const int64_t offset = static_cast<int64_t>(blockIdx.x * 32 + row) * args.n + blockIdx.y * 32 + col;
        store_global(args.out_as<float>() + offset, tile.load(col * 33 + row));
    }
}

// out = running sum of the 256 integers x of the block.
ASTRAI_GLOBAL(256) scan_kernel(Args args) {
    const Shared<int> totals = shared_array<int>(0, 8);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int i = blockIdx.x * 256 + threadIdx.x;
    int sum = load_global(args.x_as<int>() + i);
    for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
        const int before = __shfl_up_sync(FULL_WARP, sum, distance);
        sum += lane >= distance ? before : 0;
    }
    if (lane == WARP_SIZE - 1) {
        totals.store(warp, sum);
    }
    __syncthreads();
    for (int w = 0; w < warp; ++w) {
        sum += totals.load(w);
    }
    store_global(args.out_as<int>() + i, sum);
}

// out[lane] = x[lane] moved by the shuffle, the operand and the width in y; n is the mask.
template <class T>
ASTRAI_GLOBAL(32) shuffle_kernel(Args args) {
    const int mode = load_global(args.y_as<int>()), operand = load_global(args.y_as<int>() + 1);
    const int width = load_global(args.y_as<int>() + 2);
    const unsigned mask = static_cast<unsigned>(args.n);
    T value = load_global(args.x_as<T>() + threadIdx.x);
    if ((mask >> threadIdx.x & 1u) != 0) {
        if (mode == 0) {
            value = __shfl_sync(mask, value, operand, width);
        } else if (mode == 1) {
            value = __shfl_up_sync(mask, value, operand, width);
        } else if (mode == 2) {
            value = __shfl_down_sync(mask, value, operand, width);
        } else {
            value = __shfl_xor_sync(mask, value, operand, width);
        }
    }
    store_global(args.out_as<T>() + threadIdx.x, value);
}

// out [32, 3]: ballot, any and all of x[lane] over the lanes of n; 0 in other lanes.
ASTRAI_GLOBAL(32) vote_kernel(Args args) {
    const unsigned mask = static_cast<unsigned>(args.n);
    const int predicate = load_global(args.x_as<int>() + threadIdx.x);
    unsigned votes[3] = {0, 0, 0};
    if ((mask >> threadIdx.x & 1u) != 0) {
        votes[0] = __ballot_sync(mask, predicate);
        votes[1] = __any_sync(mask, predicate);
        votes[2] = __all_sync(mask, predicate);
    }
    for (int i = 0; i < 3; ++i) {
        store_global(args.out_as<unsigned>() + threadIdx.x * 3 + i, votes[i]);
    }
}

// Halves of a warp that part and meet again: out[lane] = sum of x over its half. Then a chain of pairs:
// lanes 0 to 2 add x[2], which goes from lane 2 to 1 and from there to 0, which waits for it from the start.
ASTRAI_GLOBAL(32) parting_kernel(Args args) {
    const int lane = threadIdx.x;
    const float x = load_global(args.x_as<float>() + lane);
    float sum = x, moved = x;
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    for (int distance = 8; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(half, sum, distance);
    }
    if (lane == 1 || lane == 2) {
        moved = __shfl_sync(0x6u, moved, 2);
    }
    if (lane == 0 || lane == 1) {
        moved = __shfl_sync(0x3u, moved, 1);
    }
    store_global(args.out_as<float>() + lane, lane < 3 ? sum + moved : sum);
}

// out: position of each thread, to see the built-in variables.
ASTRAI_GLOBAL(64) position_kernel(Args args) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned* out = args.out_as<unsigned>() + (block * blockDim.x + threadIdx.x) * 4;
    store_global(out, blockIdx.x);
    store_global(out + 1, blockIdx.y);
    store_global(out + 2, blockIdx.z);
    store_global(out + 3, threadIdx.x);
}

}  // namespace mini
}  // namespace astrai
