// tile[rows][32] = a[rows][K] * one block of weights: the plain kernels, in float32 or with VDPBF16PS.
//
// Every element is one chain of multiply-adds along K, in order, whatever the number of rows: a row has the same
// bits alone and among others. The chains of the columns and rows of a tile run side by side and hide each
// other's latency.
#pragma once

#include <type_traits>

#include "layout.h"

namespace astrai {

// Registers: rows * 2 accumulators, two of weights. 12 rows of 32 with AVX-512, 6 of 16 elsewhere.
constexpr int kMicroRows = kWidth == 16 ? 12 : 6;

// `fresh` says that the block comes from memory: it is fetched so far ahead, beyond its end into the next one. Two
// cores of a Xeon read 23.0 GB/s without, 24.8 with 4 KiB into the first cache, 26.2 with 4 KiB into the second.
constexpr int kPrefetchBytes = 4096;

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// Into the second cache: the first is full of activations.
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

template <int Max, class Fn>
inline void with_rows(int rows, Fn&& fn) {
  if constexpr (Max == 1) {
    fn(std::integral_constant<int, 1>{});
  } else if (rows == Max) {
    fn(std::integral_constant<int, Max>{});
  } else {
    with_rows<Max - 1>(rows, fn);
  }
}

// Splits up to 32 rows into runs of equal length, at most kMicroRows.
template <class Fn>
inline void for_micro_rows(int rows, Fn&& fn) {
  const int runs = (rows + kMicroRows - 1) / kMicroRows;
  for (int run = 0, row = 0; run < runs; ++run) {
    const int count = (rows - row + runs - run - 1) / (runs - run);
    with_rows<kMicroRows>(count, [&](auto fixed) { fn(row, fixed); });
    row += count;
  }
}

struct F32Kernel {
  using Act = float;
  static constexpr int32_t kWeights = kWeightsF32;
  static constexpr bool kQuantises = false;
  static void enter() {}
  static void leave() {}

  static void multiply(const float* a, int64_t lda, int rows, const uint8_t* block, int64_t depth, bool fresh,
                       float* tile) {
    const float* w = reinterpret_cast<const float*>(block);
    for_micro_rows(rows, [&](int row, auto fixed) {
      constexpr int R = decltype(fixed)::value;
      const bool ahead = fresh && row == 0;
      for (int col = 0; col < kBlock; col += 2 * kWidth) {
        vf acc[R][2] = {};
        for (int64_t k = 0; k < depth; ++k) {
          const float* line = w + k * kBlock + col;
          if (ahead) prefetch(reinterpret_cast<const uint8_t*>(line) + kPrefetchBytes);
          const vf w0 = load(line), w1 = load(line + kWidth);
          for (int r = 0; r < R; ++r) {
            const float x = a[(row + r) * lda + k];
            acc[r][0] += w0 * x;
            acc[r][1] += w1 * x;
          }
        }
        for (int r = 0; r < R; ++r) {
          store(tile + (row + r) * kBlock + col, acc[r][0]);
          store(tile + (row + r) * kBlock + col + kWidth, acc[r][1]);
        }
      }
    });
  }
};

// bfloat16 weights are widened on the way; activations are not rounded.
struct WidenKernel {
  using Act = float;
  static constexpr int32_t kWeights = kWeightsBf16;
  static constexpr bool kQuantises = false;
  static void enter() {}
  static void leave() {}

  static void multiply(const float* a, int64_t lda, int rows, const uint8_t* block, int64_t depth, bool fresh,
                       float* tile) {
    for_micro_rows(rows, [&](int row, auto fixed) {
      constexpr int R = decltype(fixed)::value;
      const bool ahead = fresh && row == 0;
      for (int col = 0; col < kBlock; col += kWidth) {
        // Pairs of columns col .. col + kWidth; a half is 1 KiB, a pair of k in it 64 bytes.
        const uint8_t* w = block + (col / kHalf) * 1024 + (col % kHalf) * 4;
        vf acc[R][2] = {};
        for (int64_t k = 0; k < depth; k += 2) {
          const uint8_t* line = w + k / 32 * 2048 + k % 32 / 2 * 64;
          if (ahead) prefetch(line + kPrefetchBytes);
          vu pair;
          std::memcpy(&pair, line, sizeof pair);
          const vf even = (vf)(pair << 16), odd = (vf)(pair & 0xffff0000u);
          for (int r = 0; r < R; ++r) {
            const float* x = a + (row + r) * lda + k;
            acc[r][0] += even * x[0];
            acc[r][1] += odd * x[1];
          }
        }
        for (int r = 0; r < R; ++r) store(tile + (row + r) * kBlock + col, acc[r][0] + acc[r][1]);
      }
    });
  }
};

#if defined(__AVX512BF16__)
struct DotKernel {
  using Act = bf16;
  static constexpr int32_t kWeights = kWeightsBf16;
  static constexpr bool kQuantises = false;
  static void enter() {}
  static void leave() {}

  static void multiply(const bf16* a, int64_t lda, int rows, const uint8_t* block, int64_t depth, bool fresh,
                       float* tile) {
    for_micro_rows(rows, [&](int row, auto fixed) {
      constexpr int R = decltype(fixed)::value;
      const bool ahead = fresh && row == 0;
      __m512 acc[R][2];
      for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
      for (int64_t k = 0; k < depth; k += 2) {
        const uint8_t* line = block + k / 32 * 2048 + k % 32 / 2 * 64;
        if (ahead) prefetch(line + kPrefetchBytes);
        if (ahead) prefetch(line + 1024 + kPrefetchBytes);
        const __m512bh w0 = (__m512bh)_mm512_load_si512(line), w1 = (__m512bh)_mm512_load_si512(line + 1024);
        for (int r = 0; r < R; ++r) {
          int32_t pair;
          std::memcpy(&pair, a + (row + r) * lda + k, sizeof pair);
          const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
          acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, x);
          acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, x);
        }
      }
      for (int r = 0; r < R; ++r) {
        _mm512_store_ps(tile + (row + r) * kBlock, acc[r][0]);
        _mm512_store_ps(tile + (row + r) * kBlock + kHalf, acc[r][1]);
      }
    });
  }
};
#endif

}  // namespace astrai
