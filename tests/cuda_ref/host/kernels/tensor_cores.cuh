// Kernels on ldmatrix, mma and cp.async.
#pragma once

#include "args.cuh"

namespace astrai {
namespace mini {

// Registers in, registers out: x [32, 6] holds a and b of each lane, out [32, 4] its d, in and out.
template <class T>
ASTRAI_GLOBAL(32) mma_kernel(Args args) {
    uint32_t a[4], b[2];
    float d[4];
    for (int i = 0; i < 4; ++i) {
        a[i] = load_global(args.x_as<uint32_t>() + threadIdx.x * 6 + i);
        d[i] = load_global(args.out_as<float>() + threadIdx.x * 4 + i);
    }
    for (int i = 0; i < 2; ++i) {
        b[i] = load_global(args.x_as<uint32_t>() + threadIdx.x * 6 + 4 + i);
    }
    mma_m16n8k16<T>(d, a, b);
    for (int i = 0; i < 4; ++i) {
        store_global(args.out_as<float>() + threadIdx.x * 4 + i, d[i]);
    }
}

// x: rows of 8 elements, 40 of them; lane gives row y[lane]; out [32, 4] are its registers. n: transposed.
ASTRAI_GLOBAL(32) ldmatrix_kernel(Args args) {
    const Shared<bf16> rows = shared_array<bf16>(0, 40 * 8);
    for (int i = threadIdx.x; i < 40 * 8; i += 32) {
        rows.store(i, load_global(args.x_as<bf16>() + i));
    }
    __syncwarp();
    const int row = load_global(args.y_as<int>() + threadIdx.x);
    uint32_t r[4];
    if (args.n != 0) {
        ldmatrix_x4_trans(r, rows, row * 8);
    } else {
        ldmatrix_x4(r, rows, row * 8);
    }
    for (int i = 0; i < 4; ++i) {
        store_global(args.out_as<uint32_t>() + threadIdx.x * 4 + i, r[i]);
    }
}

// out [64, 4] = x in the rows i and 32 + i where bit i of n is set, else zero. Two groups, the first waited
// for while the second is on its way.
ASTRAI_GLOBAL(32) fill_kernel(Args args) {
    const Shared<float> rows = shared_array<float>(0, 64 * 4);
    for (int row = threadIdx.x; row < 64; row += 32) {
        const bool is_kept = (args.n >> threadIdx.x & 1) != 0;
        cp_async_16(rows, row * 4, is_kept ? args.x_as<float>() + row * 4 : nullptr, is_kept);
        cp_async_commit();
    }
    cp_async_wait<1>();
    store_global(args.out_as<Bytes16>() + threadIdx.x, rows.load_as<Bytes16>(threadIdx.x * 4));
    cp_async_wait<0>();
    store_global(args.out_as<Bytes16>() + 32 + threadIdx.x, rows.load_as<Bytes16>((32 + threadIdx.x) * 4));
}

constexpr int TILE = 32, DEPTH = 16, PITCH_X = DEPTH + 8, PITCH_Y = TILE + 8;

// Slices k ... k + 15 of x [rows, n] and y [n, cols] for the tile of a block, in two stages.
template <class T>
struct MatmulTiles {
    Args args;
    Shared<T> x[2], y[2];

    ASTRAI_DEVICE explicit MatmulTiles(Args a) : args(a) {
        for (int stage = 0; stage < 2; ++stage) {
            x[stage] = shared_array<T>(stage * 2 * TILE * PITCH_X, TILE * PITCH_X);
            y[stage] = shared_array<T>(4 * TILE * PITCH_X + stage * 2 * DEPTH * PITCH_Y, DEPTH * PITCH_Y);
        }
    }

    // 128 threads: 64 chunks of 16 bytes of each.
    ASTRAI_DEVICE void start_copy(int stage, int k) const {
        const int cols = gridDim.x * TILE, chunk = threadIdx.x % 64;
        const bool keep = k < args.n;
        if (threadIdx.x < 64) {
            const int row = chunk / 2, col = chunk % 2 * 8;
            const T* source = args.x_as<T>() + (blockIdx.y * TILE + row) * args.n + k + col;
            cp_async_16(x[stage], row * PITCH_X + col, source, keep);
        } else {
            const int row = chunk / 4, col = chunk % 4 * 8;
            const T* source = args.y_as<T>() + (k + row) * cols + blockIdx.x * TILE + col;
            cp_async_16(y[stage], row * PITCH_Y + col, source, keep);
        }
        cp_async_commit();
    }
};

// out [rows, cols] float32 = x y; a block gives 32 x 32 elements, a warp 16 x 16 of them. The next slice is
// on its way while one is multiplied.
template <class T>
ASTRAI_GLOBAL(128) matmul_kernel(Args args) {
    const MatmulTiles<T> tiles(args);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int warp_row = warp / 2 * 16, warp_col = warp % 2 * 16;
    float d[2][4] = {};
    tiles.start_copy(0, 0);
    for (int k = 0; k < args.n; k += DEPTH) {
        const int stage = k / DEPTH % 2;
        tiles.start_copy(1 - stage, k + DEPTH);
        cp_async_wait<1>();
        __syncthreads();
        uint32_t a[4], b[4];
        ldmatrix_x4(a, tiles.x[stage], (warp_row + lane % 16) * PITCH_X + lane / 16 * 8);
        ldmatrix_x4_trans(b, tiles.y[stage], lane % 16 * PITCH_Y + warp_col + lane / 16 * 8);
        mma_m16n8k16<T>(d[0], a, {b[0], b[1]});
        mma_m16n8k16<T>(d[1], a, {b[2], b[3]});
        __syncthreads();
    }
    cp_async_wait<0>();
    const int64_t cols = gridDim.x * TILE;
    for (int i = 0; i < 8; ++i) {
        const int row = blockIdx.y * TILE + warp_row + lane / 4 + i / 2 % 2 * 8;
        const int col = blockIdx.x * TILE + warp_col + i / 4 * 8 + lane % 4 * 2 + i % 2;
        store_global(args.out_as<float>() + row * cols + col, d[i / 4][i % 4]);
    }
}

}  // namespace mini
}  // namespace astrai
