// Steps of quantised weights as two of bfloat16, for the matrix unit.
#pragma once

#include "quant.h"

#if defined(__AVX512BF16__)

namespace astrai {

// Lane i of vector j of the result is lane 4 j + i / 4 of `columns`: four members of a quad share a column.
inline void spread(__m512* out, vf columns) {
  const __m512i quarter = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  for (int j = 0; j < 4; ++j) {
    out[j] = _mm512_permutexvar_ps(_mm512_add_epi32(quarter, _mm512_set1_epi32(4 * j)), (__m512)columns);
  }
}

// out[2 KiB * 2]; `step` has 64 values of K.
template <int Bits>
inline void widen_step(uint8_t* out, const uint8_t* step) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (int part = 0; part < 4; ++part) {
    const int half = part / 2, group = part % 2;
    __m512 scale[4], low[4];
    if constexpr (Bits == 8) {
      spread(scale, load(int8_scales(step) + half * kHalf));
    } else {
      const uint16_t* levels = int4_levels(step) + group * 2 * kBlock + half * kHalf;
      spread(scale, load_halves(levels));
      spread(low, load_halves(levels + kBlock));
    }
    for (int quad = group * 8; quad < group * 8 + 8; ++quad) {
      alignas(64) uint8_t nibbles[64];
      const uint8_t* line = step + half * 1024 + quad * 64;
      if constexpr (Bits == 4) {
        const __m512i both = _mm512_load_si512(step + quad * 64);
        const __m512i mine = half ? _mm512_srli_epi16(both, 4) : both;
        _mm512_store_si512(nibbles, _mm512_and_si512(mine, _mm512_set1_epi8(15)));
        line = nibbles;
      }
      __m512 x[4];
      for (int j = 0; j < 4; ++j) {
        const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(line + 16 * j));
        const __m512 q = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        x[j] = Bits == 8 ? _mm512_mul_ps(q, scale[j]) : _mm512_fmadd_ps(q, scale[j], low[j]);
      }
      const __m512i left = (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]), right = (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]);
      uint8_t* pairs = out + group * 2048 + half * 1024 + quad % 8 * 128;
      _mm512_store_si512(pairs, _mm512_permutex2var_epi32(left, even, right));
      _mm512_store_si512(pairs + 64, _mm512_permutex2var_epi32(left, odd, right));
    }
  }
}

}  // namespace astrai

#endif
