// What sampling does with every logit of a row. The rest, on the few that can be drawn, is Python's.

#include <algorithm>

#include "simd.h"

namespace astrai {
namespace {

constexpr int64_t kMassBlock = 256;
constexpr float kMassOne = 4294967296.0f;

#ifdef ASTRAI_AVX512
inline vf round_even(vf x) {
  return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// A sum of whole numbers below 2^53, the same in every order.
struct MassSum {
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  void add(vf mass) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)mass)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)mass, 1)));
  }
  double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
};
#else
inline vf round_even(vf x) {
  const vf shift = splat(8388608.0f);  // 2^23: from there on a float is whole.
  return choose(x < shift, (x + shift) - shift, x);
}

struct MassSum {
  double lanes[kWidth] = {};
  void add(vf mass) {
    for (int i = 0; i < kWidth; ++i) lanes[i] += mass[i];
  }
  double total() const {
    double all = 0;
    for (double lane : lanes) all += lane;
    return all;
  }
};
#endif

inline vf weigh(vf logits, vf top, vf scale) { return round_even(exp((logits - top) * scale) * kMassOne); }

// The last n of a row, n < kWidth.
inline vf load_rest(const float* logits, int64_t n) {
  float rest[kWidth];
  for (int64_t i = 0; i < kWidth; ++i) rest[i] = i < n ? logits[i] : -INFINITY;
  return load(rest);
}

double sum_block(const float* logits, int64_t n, vf top, vf scale) {
  MassSum even, odd;
  int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    even.add(weigh(load(logits + i), top, scale));
    odd.add(weigh(load(logits + i + kWidth), top, scale));
  }
  for (; i + kWidth <= n; i += kWidth) even.add(weigh(load(logits + i), top, scale));
  if (i < n) even.add(weigh(load_rest(logits + i, n - i), top, scale));
  return even.total() + odd.total();
}

}  // namespace
}  // namespace astrai

extern "C" {

// Mass of each of n finite logits or -infinity, none above `top`: whole numbers, that of `top` is 2^32.
void astrai_weigh(const float* logits, int64_t n, float top, float scale, float* mass) {
  using namespace astrai;
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(mass + i, weigh(load(logits + i), splat(top), splat(scale)));
  if (i < n) {
    float rest[kWidth];
    store(rest, weigh(load_rest(logits + i, n - i), splat(top), splat(scale)));
    std::copy(rest, rest + (n - i), mass + i);
  }
}

// Their sums over every 256 neighbours.
void astrai_sum_mass(const float* logits, int64_t n, float top, float scale, double* sums) {
  using namespace astrai;
  for (int64_t at = 0; at < n; at += kMassBlock)
    *sums++ = sum_block(logits + at, std::min(kMassBlock, n - at), splat(top), splat(scale));
}

// Indices of the logits that reach `bound`, ascending, into ids [n]; how many there are.
int64_t astrai_find_large(const float* logits, int64_t n, float bound, int64_t* ids) {
  int64_t found = 0, i = 0;
#ifdef ASTRAI_AVX512
  const __m512 bounds = _mm512_set1_ps(bound);
  for (; i + 64 <= n; i += 64) {
    uint64_t hits = 0;
    for (int j = 0; j < 4; ++j)
      hits |= uint64_t(_mm512_cmp_ps_mask(_mm512_loadu_ps(logits + i + 16 * j), bounds, _CMP_GE_OQ)) << (16 * j);
    for (; hits; hits &= hits - 1) ids[found++] = i + __builtin_ctzll(hits);
  }
#endif
  for (; i < n; ++i) {
    ids[found] = i;
    found += logits[i] >= bound;
  }
  return found;
}
}
