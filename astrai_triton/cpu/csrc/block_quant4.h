// Products of int4 weights. Theirs is low + scale * q with q in 0..15, so that a sum over a fine group of 32 is
// scale * sum(x q) + low * sum(x): the first sum is an integer product, the second comes with the activations.
#pragma once

#include "block_amx.h"
#include "quant.h"

namespace astrai {

// sums[rows][2][32] = rows * step, by fine groups.
#if defined(__AVX512VNNI__)
inline void multiply_few_fine(int32_t* sums, const uint8_t* a, int64_t stride, int rows, const uint8_t* w) {
  const __m512i nibble = _mm512_set1_epi8(15);
  for_micro_rows(rows, [&](int row, auto fixed) {
    constexpr int R = decltype(fixed)::value;
    for (int group = 0; group < 2; ++group) {
      __m512i acc[R][2];
      for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
      for (int quad = group * 8; quad < group * 8 + 8; ++quad) {
        const __m512i both = _mm512_load_si512(w + quad * 64);
        const __m512i w0 = _mm512_and_si512(both, nibble);
        const __m512i w1 = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
        for (int r = 0; r < R; ++r) {
          int32_t four;
          std::memcpy(&four, a + (row + r) * stride + quad * 4, sizeof four);
          const __m512i x = _mm512_set1_epi32(four);
          acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], w0, x);
          acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], w1, x);
        }
      }
      for (int r = 0; r < R; ++r) {
        int32_t* out = sums + ((row + r) * 2 + group) * kBlock;
        _mm512_store_si512(out, acc[r][0]);
        _mm512_store_si512(out + kHalf, acc[r][1]);
      }
    }
  });
}
#else
inline void multiply_few_fine(int32_t* sums, const uint8_t* a, int64_t stride, int rows, const uint8_t* w) {
  for (int r = 0; r < rows; ++r) {
    const int8_t* x = reinterpret_cast<const int8_t*>(a + r * stride);
    for (int col = 0; col < kBlock; col += kWidth) {
      vi acc[2] = {};
      for (int quad = 0; quad < 16; ++quad) {
        vu four;
        std::memcpy(&four, w + quad * 64 + col % kHalf * 4, sizeof four);
        four >>= col / kHalf * 4;
        for (int i = 0; i < 4; ++i) acc[quad / 8] += (vi)(four >> (8 * i) & 15) * x[quad * 4 + i];
      }
      for (int group = 0; group < 2; ++group) {
        std::memcpy(sums + (r * 2 + group) * kBlock + col, &acc[group], sizeof acc[group]);
      }
    }
  }
}
#endif

// The same for the steps of a block in turn.
#if defined(__AMX_INT8__)
class FineProduct {
 public:
  explicit FineProduct(int rows) : rows_(rows) {
    // A tile has 16 quads, a fine group 8: the other half of its tile is zero.
    if (rows > kFewRows) std::memset(tiles_, 0, sizeof tiles_);
  }

  void multiply(int32_t* sums, const uint8_t* a, int64_t stride, const uint8_t* w) {
    if (rows_ <= kFewRows) return multiply_few_fine(sums, a, stride, rows_, w);
    widen_nibbles(w);
    settle_stores();
    _tile_loadd(4, a, stride);
    if (rows_ > 16) _tile_loadd(5, a + 16 * stride, stride);
    for (int half = 0; half < 2; ++half) {
      _tile_loadd(6, tiles_[half][0], 64);
      _tile_loadd(7, tiles_[half][1], 64);
      _tile_zero(0);
      _tile_zero(1);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_stored(0, sums + half * kHalf, 2 * kBlock * 4);
      _tile_stored(1, sums + half * kHalf + kBlock, 2 * kBlock * 4);
      if (rows_ <= 16) continue;
      _tile_zero(2);
      _tile_zero(3);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
      _tile_stored(2, sums + 16 * 2 * kBlock + half * kHalf, 2 * kBlock * 4);
      _tile_stored(3, sums + 16 * 2 * kBlock + half * kHalf + kBlock, 2 * kBlock * 4);
    }
  }

 private:
  // The tiles cost the same for 1 row and for 16: VNNI takes 30 % less for one row, as much for 8, 25 % more for 16.
  static constexpr int kFewRows = 8;

  void widen_nibbles(const uint8_t* w) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int quad = 0; quad < 16; ++quad) {
      const __m512i both = _mm512_load_si512(w + quad * 64);
      _mm512_store_si512(tiles_[0][quad / 8] + quad * 64, _mm512_and_si512(both, nibble));
      _mm512_store_si512(tiles_[1][quad / 8] + quad * 64, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
    }
  }

  const int rows_;
  alignas(64) uint8_t tiles_[2][2][kTileBytes];  // [halves][fine groups]
};
#else
class FineProduct {
 public:
  explicit FineProduct(int rows) : rows_(rows) {}

  void multiply(int32_t* sums, const uint8_t* a, int64_t stride, const uint8_t* w) {
    multiply_few_fine(sums, a, stride, rows_, w);
  }

 private:
  const int rows_;
};
#endif

// tile (+)= scale of the row * (sums * scales of the columns + sums of the row * lows of the columns).
inline void add_fine_groups(float* tile, const int32_t* sums, const uint8_t* row_factors, int64_t stride, int rows,
                            const uint16_t* levels, bool is_first) {
  for (int col = 0; col < kBlock; col += kWidth) {
    const vf scale0 = load_halves(levels + col), low0 = load_halves(levels + kBlock + col);
    const vf scale1 = load_halves(levels + 2 * kBlock + col), low1 = load_halves(levels + 3 * kBlock + col);
    for (int r = 0; r < rows; ++r) {
      float factors[3];
      std::memcpy(factors, row_factors + r * stride, sizeof factors);
      vi sum0, sum1;
      std::memcpy(&sum0, sums + r * 2 * kBlock + col, sizeof sum0);
      std::memcpy(&sum1, sums + (r * 2 + 1) * kBlock + col, sizeof sum1);
      const vf first = __builtin_convertvector(sum0, vf) * scale0 + low0 * factors[1];
      const vf second = __builtin_convertvector(sum1, vf) * scale1 + low1 * factors[2];
      float* out = tile + r * kBlock + col;
      const vf part = (first + second) * factors[0];
      store(out, is_first ? part : load(out) + part);
    }
  }
}

}  // namespace astrai
