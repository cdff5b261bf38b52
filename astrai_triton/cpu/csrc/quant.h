// Quantisation of weights along K: int8 about zero in groups of 64, int4 from a minimum upwards in groups of 32.
//
// The latter is how GGUF's Q4_1 holds weights, and Q4_0 is a case of it: what such a file gives is kept as it is.
#pragma once

#include <algorithm>

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

// What follows the values of a step: scales of columns; scales, then lows, of columns by fine groups.
inline const bf16* int8_scales(const uint8_t* step) { return reinterpret_cast<const bf16*>(step + kGroup * kBlock); }
inline const uint16_t* int4_levels(const uint8_t* step) {
  return reinterpret_cast<const uint16_t*>(step + kGroup * kBlock / 2);
}

inline void pack_int8(uint8_t* step, const float* values, int c) {
  const bf16 scale = narrow_up(largest(values) / 127.0f);
  reinterpret_cast<bf16*>(step + kGroup * kBlock)[c] = scale;
  const float inverse = scale ? 1.0f / widen(scale) : 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float q = std::nearbyint(values[i] * inverse);
    step[quad_offset(i, c)] = uint8_t(int8_t(q > 127 ? 127 : q < -127 ? -127 : q));
  }
}

// A value of an int4 group is low + scale * q with q in 0..15. Both are held as float16.
struct Levels {
  float scale, low;

  int quantise(float x) const {
    const float q = scale > 0.0f ? std::nearbyint((x - low) / scale) : 0.0f;
    return int(q > 15.0f ? 15.0f : q < 0.0f ? 0.0f : q);
  }
  Levels rounded() const { return {widen_half(narrow_half(scale)), widen_half(narrow_half(low))}; }
};

// Of a group under some levels: the squared error, and the sums that the best line through (q, value) follows from.
struct Fit {
  float error = 0, q = 0, qq = 0, x = 0, qx = 0;

  Fit(const float* values, const Levels& levels) {
    const float inverse = levels.scale > 0.0f ? 1.0f / levels.scale : 0.0f;
    for (int i = 0; i < kFineGroup; ++i) {
      const float exact = std::nearbyint((values[i] - levels.low) * inverse);
      const float level = exact > 15.0f ? 15.0f : exact < 0.0f ? 0.0f : exact;
      const float off = values[i] - (levels.low + levels.scale * level);
      error += off * off;
      q += level;
      qq += level * level;
      x += values[i];
      qx += level * values[i];
    }
  }
  Levels line() const {
    const float spread = kFineGroup * qq - q * q;
    const float scale = spread > 0.0f ? std::max(0.0f, (kFineGroup * qx - q * x) / spread) : 0.0f;
    return {scale, (x - scale * q) / kFineGroup};
  }
};

// The levels with the least squared error that a search finds: of all spans it tries the ends, then the best line for
// the integers these give. Groups that were on 9 to 16 even levels before are met exactly by one of the first.
inline Levels find_levels(const float* values) {
  float low = values[0], high = values[0];
  for (int i = 1; i < kFineGroup; ++i) {
    low = std::min(low, values[i]);
    high = std::max(high, values[i]);
  }
  Levels best{0.0f, low};
  float least = INFINITY;
  const auto consider = [&](const Levels& levels) {
    const Levels held = levels.rounded();
    const Fit fit(values, held);
    if (fit.error < least) {
      least = fit.error;
      best = held;
    }
    return fit;
  };
  for (int steps = 15; steps >= 8; --steps) {
    consider(consider({(high - low) / float(steps), low}).line());
  }
  for (int cut = 1; cut <= 4; ++cut) {
    const float off = 0.02f * float(cut) * (high - low);
    consider(consider({(high - low - 2 * off) / 15.0f, low + off}).line());
  }
  return best;
}

// Byte 64 * quad + 4 * column + member of the step holds that value of half 0 in its low four bits and that of
// half 1 in its high four. The levels of a group are [32] scales, then [32] lows.
inline void pack_int4(uint8_t* step, const float* values, int c) {
  for (int group = 0; group < kGroup / kFineGroup; ++group) {
    const float* members = values + group * kFineGroup;
    const Levels levels = find_levels(members);
    uint16_t* held = reinterpret_cast<uint16_t*>(step + kGroup * kBlock / 2) + group * 2 * kBlock + c;
    held[0] = narrow_half(levels.scale);
    held[kBlock] = narrow_half(levels.low);
    for (int i = 0; i < kFineGroup; ++i) {
      const uint8_t q = uint8_t(levels.quantise(members[i]));
      step[quad_offset(group * kFineGroup + i, c) % 1024] |= uint8_t(c < kHalf ? q : q << 4);
    }
  }
}

}  // namespace astrai
