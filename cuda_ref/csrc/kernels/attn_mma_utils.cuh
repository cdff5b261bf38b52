// Tiles in shared memory and the fragments that mma.m16n8k16 takes from them.
#pragma once

#include "csrc/kernels/device.cuh"

namespace astrai {

// Rows of COLS 16-bit elements, COLS a multiple of 32. Chunks of 8 elements (16 bytes) are permuted within a row so
// that the 8 rows that ldmatrix reads at one column lie in different banks.
template <class T, int COLS>
struct SwizzledTile {
    static_assert(COLS % 32 == 0, "a row is a multiple of 64 bytes");
    Shared<T> data;

    ASTRAI_HOST_DEVICE static constexpr int index(int row, int col) {
        const int chunk = col / 8;
        // Rows that start at the same bank: every one where a row is a multiple of 128 bytes, else every other.
        const int swizzled = COLS % 64 == 0 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
        return row * COLS + swizzled * 8 + col % 8;
    }

    // Index of the element col columns after one in columns 0 ... 15, col a multiple of 16: an xor and a sum with
    // constants, so that unrolled loads share the registers of their addresses.
    ASTRAI_HOST_DEVICE static constexpr int skip(int index, int col) {
        constexpr int PERMUTED = COLS % 64 == 0 ? 64 : 32;
        return (index ^ (col % PERMUTED)) + col / PERMUTED * PERMUTED;
    }
};

// Rows row ... row + 15 and columns col ... col + 15 as the left operand. Here and below col is a multiple
// of 16.
template <class T, int COLS>
ASTRAI_DEVICE void load_left(uint32_t (&a)[4], SwizzledTile<T, COLS> tile, int row, int col) {
    const int lane = threadIdx.x % WARP_SIZE;
    ldmatrix_x4(a, tile.data, tile.skip(tile.index(row + lane % 16, lane / 16 * 8), col));
}

// Two right operands of a product with the transposed tile: their columns are rows row ... row + 7 and
// row + 8 ... row + 15 of the tile, their rows its columns col ... col + 15.
template <class T, int COLS>
ASTRAI_DEVICE void load_right_transposed(uint32_t (&b)[2][2], SwizzledTile<T, COLS> tile, int row, int col) {
    const int lane = threadIdx.x % WARP_SIZE;
    uint32_t r[4];
    ldmatrix_x4(r, tile.data, tile.skip(tile.index(row + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8), col));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// Two right operands of a product with the tile: their rows are rows row ... row + 15 of the tile, their columns
// its columns col ... col + 7 and col + 8 ... col + 15.
template <class T, int COLS>
ASTRAI_DEVICE void load_right(uint32_t (&b)[2][2], SwizzledTile<T, COLS> tile, int row, int col) {
    const int lane = threadIdx.x % WARP_SIZE;
    uint32_t r[4];
    ldmatrix_x4_trans(r, tile.data, tile.skip(tile.index(row + lane % 16, lane / 16 * 8), col));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// Two neighbouring accumulators [16, 8] as the left operand [16, 16] of the next product, rounded to T.
template <class T>
ASTRAI_DEVICE void pack_left(uint32_t (&a)[4], const float (&first)[4], const float (&second)[4]) {
    a[0] = pack_pair<T>(first[0], first[1]);
    a[1] = pack_pair<T>(first[2], first[3]);
    a[2] = pack_pair<T>(second[0], second[1]);
    a[3] = pack_pair<T>(second[2], second[3]);
}

}  // namespace astrai
