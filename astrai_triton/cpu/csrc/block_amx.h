// The bfloat16 kernel on the matrix unit, for any number of rows.
//
// TDPBF16PS multiplies 16 rows by 32 of K by 16 columns in 16 cycles: 1024 flop a cycle and core, 8 times what
// VDPBF16PS does. Even for one row, padded to 16, it takes 16 cycles for a KiB of weights, which memory takes over a
// hundred to deliver, so decode uses it too, and a row has the same bits alone, in a batch and in a prefill: an
// element is one chain along K, which other rows do not enter.
#pragma once

#include "block.h"

#if defined(__AMX_BF16__)

#include <sys/syscall.h>
#include <unistd.h>

namespace astrai {

constexpr int kTileBytes = 1024;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// All eight tiles are 16 rows of 64 bytes.
inline void configure_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  _tile_loadconfig(&config);
}

// GCC does not know that a tile is loaded from memory: without this it may move stores of what is to be loaded behind
// the load. Stands before tiles are loaded from what the same function has written.
inline void settle_stores() { __asm__ volatile("" ::: "memory"); }

// Linux saves the tiles of a process only once it has asked for them.
inline bool request_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct AmxKernel {
  using Act = bf16;
  static constexpr int32_t kWeights = kWeightsBf16;
  static constexpr bool kQuantises = false;
  static void enter() { configure_tiles(); }
  static void leave() { _tile_release(); }

  static void multiply(const bf16* a, int64_t lda, int rows, const uint8_t* block, int64_t depth, bool fresh,
                       float* tile) {
    settle_stores();
    if (rows == 1) {
      // 16 times the one row: the other 15 would take their way through the first cache, and a tenth of the time.
      multiply16(a, 0, block, depth, tile);
    } else if (rows <= 16) {
      multiply16(a, lda, block, depth, tile);
    } else if (fresh) {
      multiply32<true>(a, lda, block, depth, tile);
    } else {
      multiply32<false>(a, lda, block, depth, tile);
    }
  }

 private:
  static void prefetch_step(const uint8_t* w) {
#pragma GCC unroll 32
    for (int line = 0; line < 32; ++line) prefetch_far(w + kPrefetchBytes + line * 64);
  }

  static void multiply16(const bf16* a, int64_t lda, const uint8_t* w, int64_t depth, float* tile) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < depth; k += 32, w += 2 * kTileBytes) {
      prefetch_step(w);
      _tile_loadd(4, a + k, lda * 2);
      _tile_loadd(6, w, 64);
      _tile_loadd(7, w + kTileBytes, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, tile, kBlock * 4);
    _tile_stored(1, tile + kHalf, kBlock * 4);
  }

  // 2 x 2 tiles: four loads for four products.
  template <bool Fresh>
  static void multiply32(const bf16* a, int64_t lda, const uint8_t* w, int64_t depth, float* tile) {
    const bf16* below = a + 16 * lda;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += 32, w += 2 * kTileBytes) {
      if (Fresh) prefetch_step(w);
      _tile_loadd(4, a + k, lda * 2);
      _tile_loadd(6, w, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, below + k, lda * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, tile, kBlock * 4);
    _tile_stored(1, tile + kHalf, kBlock * 4);
    _tile_stored(2, tile + 16 * kBlock, kBlock * 4);
    _tile_stored(3, tile + 16 * kBlock + kHalf, kBlock * 4);
  }
};

}  // namespace astrai

#endif
