// Symmetric quantisation in groups of 64 along K.
#pragma once

#include "layout.h"

namespace astrai {

inline float largest(const float* values) {
  float top = 0;
  for (int i = 0; i < kGroup; ++i) top = std::fabs(values[i]) > top ? std::fabs(values[i]) : top;
  return top;
}

// Scales are bfloat16: half the bytes of float32, and nothing is lost, since values are divided by the scale as it
// is stored. It is rounded up, so that no value leaves the range.
inline bf16 narrow_up(float x) {
  const bf16 rounded = narrow(x);
  return widen(rounded) < x ? bf16(rounded + 1) : rounded;
}

// Where value i of a group of column c lies: half, quad of K, column, member of the quad.
inline int quad_offset(int i, int c) { return c / kHalf * 1024 + i / 4 * 64 + c % kHalf * 4 + i % 4; }

inline void pack_int8(uint8_t* step, const float* values, int c) {
  const bf16 scale = narrow_up(largest(values) / 127.0f);
  reinterpret_cast<bf16*>(step + kGroup * kBlock)[c] = scale;
  const float inverse = scale ? 1.0f / widen(scale) : 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float q = std::nearbyint(values[i] * inverse);
    step[quad_offset(i, c)] = uint8_t(int8_t(q > 127 ? 127 : q < -127 ? -127 : q));
  }
}

// Squared error of a group under a scale, values clamped to -8..7.
inline float int4_error(const float* values, float scale) {
  float error = 0;
  for (int i = 0; i < kGroup; ++i) {
    float q = std::nearbyint(values[i] / scale);
    q = q > 7 ? 7 : q < -8 ? -8 : q;
    error += (values[i] - q * scale) * (values[i] - q * scale);
  }
  return error;
}

// The scale with the least squared error, of either sign: -8 reaches one step further than 7.
inline bf16 find_int4_scale(const float* values) {
  const float top = largest(values);
  if (top == 0) return 0;
  bf16 best = 0;
  float least = INFINITY;
  for (int step = 0; step < 16; ++step) {
    for (int sign = -1; sign <= 1; sign += 2) {
      const bf16 scale = narrow(float(sign) * top / (6.0f + 0.2f * float(step)));
      const float error = int4_error(values, widen(scale));
      if (error < least) {
        least = error;
        best = scale;
      }
    }
  }
  return best;
}

// Byte 64 * quad + 4 * column + member of the block holds that value of half 0 in its low four bits and that of
// half 1 in its high four.
inline void pack_int4(uint8_t* step, const float* values, int c) {
  const bf16 scale = find_int4_scale(values);
  reinterpret_cast<bf16*>(step + kGroup * kBlock / 2)[c] = scale;
  for (int i = 0; i < kGroup; ++i) {
    float q = scale ? std::nearbyint(values[i] / widen(scale)) : 0.0f;
    q = q > 7 ? 7 : q < -8 ? -8 : q;
    const uint8_t nibble = uint8_t(int8_t(q)) & 15;
    step[quad_offset(i, c) % 1024] |= uint8_t(c < kHalf ? nibble : nibble << 4);
  }
}

}  // namespace astrai
