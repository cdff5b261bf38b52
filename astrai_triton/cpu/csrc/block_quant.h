// The kernels of quantised weights: integer products of groups, scaled and added in float32.
//
// Activations are quantised to int8 in groups of 64 along K, with a scale for each row and group. A product of two
// groups is exact in int32, so instruction sets differ only in how the float32 sum of groups is rounded.
#pragma once

#include "block_quant4.h"
#include "widen.h"

namespace astrai {

#if defined(__AVX512VNNI__)
// VPDPBUSD multiplies unsigned by signed bytes: 128 is added to activations, and 128 times the weights taken off again,
// one product more for all rows.
inline void multiply_few(int32_t* sums, const uint8_t* a, int64_t stride, int rows, const uint8_t* w) {
  const __m512i flip = _mm512_set1_epi8(-128);
  for_micro_rows(rows, [&](int row, auto fixed) {
    constexpr int R = decltype(fixed)::value;
    __m512i acc[R][2], excess[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
    for (int quad = 0; quad < 16; ++quad) {
      const __m512i w0 = _mm512_load_si512(w + quad * 64), w1 = _mm512_load_si512(w + 1024 + quad * 64);
      excess[0] = _mm512_dpbusd_epi32(excess[0], flip, w0);
      excess[1] = _mm512_dpbusd_epi32(excess[1], flip, w1);
      for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, a + (row + r) * stride + quad * 4, sizeof four);
        const __m512i x = _mm512_xor_si512(_mm512_set1_epi32(four), flip);
        acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], x, w0);
        acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], x, w1);
      }
    }
    for (int r = 0; r < R; ++r) {
      int32_t* out = sums + (row + r) * kBlock;
      _mm512_store_si512(out, _mm512_sub_epi32(acc[r][0], excess[0]));
      _mm512_store_si512(out + kHalf, _mm512_sub_epi32(acc[r][1], excess[1]));
    }
  });
}
#else
inline void multiply_few(int32_t* sums, const uint8_t* a, int64_t stride, int rows, const uint8_t* w) {
  for (int r = 0; r < rows; ++r) {
    const int8_t* x = reinterpret_cast<const int8_t*>(a + r * stride);
    for (int col = 0; col < kBlock; col += kWidth) {
      vi acc = {};
      for (int quad = 0; quad < 16; ++quad) {
        vu four;
        std::memcpy(&four, w + col / kHalf * 1024 + quad * 64 + col % kHalf * 4, sizeof four);
        for (int i = 0; i < 4; ++i) acc += ((vi)(four << (24 - 8 * i)) >> 24) * x[quad * 4 + i];
      }
      std::memcpy(sums + r * kBlock + col, &acc, sizeof acc);
    }
  }
}
#endif

// sums[rows][32] = rows * step.
#if defined(__AMX_INT8__)
// On the matrix unit. Rows are padded to tiles; what is in the padding stays there. VNNI takes 5 % less for one row,
// 17 % more for four.
inline void multiply_group(int32_t* sums, const uint8_t* a, int64_t stride, int rows, const uint8_t* w) {
  if (rows == 1) return multiply_few(sums, a, stride, rows, w);
  settle_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(4, a, stride);
  _tile_loadd(6, w, 64);
  _tile_loadd(7, w + 1024, 64);
  _tile_dpbssd(0, 4, 6);
  _tile_dpbssd(1, 4, 7);
  _tile_stored(0, sums, kBlock * 4);
  _tile_stored(1, sums + kHalf, kBlock * 4);
  if (rows <= 16) return;
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(5, a + 16 * stride, stride);
  _tile_dpbssd(2, 5, 6);
  _tile_dpbssd(3, 5, 7);
  _tile_stored(2, sums + 16 * kBlock, kBlock * 4);
  _tile_stored(3, sums + 16 * kBlock + kHalf, kBlock * 4);
}
#else
inline void multiply_group(int32_t* sums, const uint8_t* a, int64_t stride, int rows, const uint8_t* w) {
  multiply_few(sums, a, stride, rows, w);
}
#endif

template <class A, int Bits>
struct QuantKernel {
  using Act = A;
  using Head = QuantKernel<A, 8>;
  static constexpr int32_t kWeights = Bits == 8 ? kWeightsInt8 : kWeightsInt4;
  static constexpr bool kQuantises = true;
  static constexpr int64_t kStepBytes = Bits == 8 ? kQuantStep8 : kQuantStep4;
  // Float32 numbers of a group of a row: its scale; with int4 also the sums of its integers by fine groups.
  static constexpr int kFactors = Bits == 8 ? 1 : 1 + kGroup / kFineGroup;

  // Whether many rows multiply faster by the block widened to bfloat16. With VNNI alone they do not.
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  static constexpr bool kWidens = std::is_same_v<Act, bf16>;
  static void enter() { configure_tiles(); }
  static void leave() { _tile_release(); }

  // The block in layout.h's form of bfloat16; each weight is rounded once.
  static void widen_block(uint8_t* out, const uint8_t* block, int64_t depth) {
    for (int64_t g = 0; g < depth / kGroup; ++g) {
      prefetch_step(block + g * kStepBytes);
      widen_step<Bits>(out + g * 2 * kGroup * kBlock, block + g * kStepBytes);
    }
  }
#else
  static constexpr bool kWidens = false;
  static void enter() {}
  static void leave() {}
#endif

  // A quantised row: depth values of int8, then the factors of each group.
  static int64_t row_bytes(int64_t depth) { return depth + depth / kGroup * kFactors * 4; }

  // A row of `depth` values, a multiple of 64. A group with NaN or infinity gets a scale that is one.
  static void quantise(uint8_t* out, const Act* x, int64_t depth) {
    // Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits.
    constexpr float kRound = 12582912.0f;
    float* factors = reinterpret_cast<float*>(out + depth);
    for (int64_t start = 0; start < depth; start += kGroup, factors += kFactors) {
      vf top = {}, poison = {};
      for (int i = 0; i < kGroup; i += kWidth) {
        const vf v = load(x + start + i);
        top = maximum(maximum(v, -v), top);
        poison += v * 0.0f;
      }
      const float largest = max_lanes(top);
      const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
      factors[0] = largest / 127.0f + sum_lanes(poison);
      for (int fine = 0; fine < kGroup; fine += kFineGroup) {
        vf sum = {};
        for (int i = fine; i < fine + kFineGroup; i += kWidth) {
          const vf shifted = load(x + start + i) * inverse + kRound;
          const vb bytes = __builtin_convertvector((vi)shifted, vb);
          std::memcpy(out + start + i, &bytes, sizeof bytes);
          sum += shifted - kRound;
        }
        if constexpr (Bits == 4) factors[1 + fine / kFineGroup] = sum_lanes(sum);
      }
    }
  }

  static void multiply(const uint8_t* a, int64_t stride, int rows, const uint8_t* block, int64_t depth, bool fresh,
                       float* tile) {
    const uint8_t* factors = a + depth;
    if constexpr (Bits == 8) {
      alignas(64) int32_t sums[kTileRows * kBlock];
      for (int64_t g = 0; g < depth / kGroup; ++g) {
        const uint8_t* step = block + g * kStepBytes;
        if (fresh) prefetch_step(step);
        multiply_group(sums, a + g * kGroup, stride, rows, step);
        add_group(tile, sums, factors + g * kFactors * 4, stride, rows, int8_scales(step), g == 0);
      }
    } else {
      alignas(64) int32_t sums[kTileRows * 2 * kBlock];
      FineProduct product(rows);
      for (int64_t g = 0; g < depth / kGroup; ++g) {
        const uint8_t* step = block + g * kStepBytes;
        if (fresh) prefetch_step(step);
        product.multiply(sums, a + g * kGroup, stride, step);
        add_fine_groups(tile, sums, factors + g * kFactors * 4, stride, rows, int4_levels(step), g == 0);
      }
    }
  }

 private:
  static void prefetch_step(const uint8_t* step) {
    for (int64_t i = 0; i < kStepBytes; i += 64) prefetch(step + kPrefetchBytes + i);
  }

  // tile (+)= sums * scale of the row * scale of the column.
  static void add_group(float* tile, const int32_t* sums, const uint8_t* row_scales, int64_t stride, int rows,
                        const bf16* column_scales, bool is_first) {
    constexpr int kVectors = kBlock / kWidth;
    vf scale[kVectors];
    for (int i = 0; i < kVectors; ++i) scale[i] = load(column_scales + i * kWidth);
    for (int r = 0; r < rows; ++r) {
      float row_scale;
      std::memcpy(&row_scale, row_scales + r * stride, sizeof row_scale);
      for (int i = 0; i < kVectors; ++i) {
        float* out = tile + r * kBlock + i * kWidth;
        vi sum;
        std::memcpy(&sum, sums + r * kBlock + i * kWidth, sizeof sum);
        const vf part = __builtin_convertvector(sum, vf) * (scale[i] * row_scale);
        store(out, is_first ? part : load(out) + part);
      }
    }
  }
};

}  // namespace astrai
