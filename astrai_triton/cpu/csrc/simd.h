// Vectors of the width the machine has, written once.
//
// A `vf` is the widest float vector of the instruction set that this file is compiled for: 16 lanes with
// AVX-512, 8 with AVX2, 4 otherwise. GCC and Clang lower the same expressions to whatever that is, so the kernels
// that are not worth intrinsics exist once. Layouts in memory never depend on the width.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace astrai {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define ASTRAI_AVX512 1
constexpr int kWidth = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

using bf16 = uint16_t;

typedef float vf __attribute__((vector_size(kWidth * 4)));
typedef int32_t vi __attribute__((vector_size(kWidth * 4)));
typedef uint32_t vu __attribute__((vector_size(kWidth * 4)));
typedef uint16_t vh __attribute__((vector_size(kWidth * 2)));
typedef int8_t vb __attribute__((vector_size(kWidth)));

inline vf splat(float x) { return x - vf{}; }
inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

inline float widen(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
inline float widen(float x) { return x; }

// Round to nearest even; a NaN stays one, where the addition alone could carry it into infinity.
inline bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return x != x ? bf16(0x7fc0) : bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline vf load(const bf16* p) {
  vh half;
  std::memcpy(&half, p, sizeof half);
  return (vf)(__builtin_convertvector(half, vu) << 16);
}
inline void store(bf16* p, vf v) {
#if defined(__AVX512BF16__)
  // Like the above, but subnormals become 0.
  const __m256bh half = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &half, sizeof half);
#else
  const vu bits = (vu)v;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vu kept = (vu)(v == v);
  const vh half = __builtin_convertvector((rounded & kept) | (0x7fc0 & ~kept), vh);
  std::memcpy(p, &half, sizeof half);
#endif
}
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) { *p = narrow(x); }

// float16, as bits. Its exponents are those of float32 less 112; a product moves them, subnormals included.
inline float widen_half(uint16_t x) {
  const uint32_t bits = uint32_t(x & 0x7fff) << 13;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return (x & 0x8000 ? -f : f) * 0x1p112f;
}
// To nearest even; what is too large becomes the largest.
inline uint16_t narrow_half(float x) {
  const float size = std::fabs(x) < 65504.0f ? std::fabs(x) * 0x1p-112f : 65504.0f * 0x1p-112f;
  uint32_t bits;
  std::memcpy(&bits, &size, sizeof bits);
  return uint16_t((bits + 0xfff + ((bits >> 13) & 1)) >> 13 | (x < 0 ? 0x8000 : 0));
}
inline vf load_halves(const uint16_t* p) {
#ifdef ASTRAI_AVX512
  __m256i halves;
  std::memcpy(&halves, p, sizeof halves);
  return (vf)_mm512_cvtph_ps(halves);
#else
  vh halves;
  std::memcpy(&halves, p, sizeof halves);
  const vu bits = __builtin_convertvector(halves, vu);
  const vf size = (vf)((bits & 0x7fff) << 13) * 0x1p112f;
  return (vf)((vu)size | ((bits & 0x8000) << 16));
#endif
}

inline vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
inline vf maximum(vf a, vf b) { return choose(a > b, a, b); }

inline float sum_lanes(vf v) {
#ifdef ASTRAI_AVX512
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < kWidth; ++i) total += v[i];
  return total;
#endif
}
inline float max_lanes(vf v) {
#ifdef ASTRAI_AVX512
  return _mm512_reduce_max_ps((__m512)v);
#else
  float top = v[0];
  for (int i = 1; i < kWidth; ++i) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

#ifdef ASTRAI_AVX512
// 2^x: x = n + f with |f| <= 1/2, and VSCALEFPS puts n into the exponent, saturating as it should at both ends.
template <int Degree = 6>
inline vf exp2(vf x) {
  static_assert(Degree == 4 || Degree == 6, "the polynomials there are");
  const __m512 n = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf f = x - (vf)n;
  vf p;
  if constexpr (Degree == 6) {
    p = splat(1.5370705e-4f);
    p = p * f + 1.3399848e-3f;
    p = p * f + 9.6183733e-3f;
    p = p * f + 5.5503290e-2f;
    p = p * f + 2.4022648e-1f;
    p = p * f + 6.9314721e-1f;
    p = p * f + 1.0f;
  } else {
    // To 3e-6, for results that are rounded to bfloat16.
    p = splat(9.6003955e-3f);
    p = p * f + 5.5916894e-2f;
    p = p * f + 2.4023718e-1f;
    p = p * f + 6.9312199e-1f;
    p = p * f + 1.0f;
  }
  return (vf)_mm512_scalef_ps((__m512)p, n);
}
#else
// 2^x. x = n + f with |f| <= 1/2: 2^n goes into the exponent, 2^f is a polynomial that is off by 2e-9.
// Below 2^-126 the result is 0; NaN stays NaN.
template <int Degree = 6>
inline vf exp2(vf x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
  const vi tiny = x < -126.0f, huge = x > 127.5f;
  const vf inside = choose(huge, splat(127.5f), choose(tiny, splat(-126.0f), x));
  const vf shifted = inside + kRound;
  const vf f = inside - (shifted - kRound);
  vf p = splat(1.5370705e-4f);
  p = p * f + 1.3399848e-3f;
  p = p * f + 9.6183733e-3f;
  p = p * f + 5.5503290e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314721e-1f;
  p = p * f + 1.0f;
  const vf scaled = (vf)((vi)p + ((vi)shifted << 23));
  const vf bounded = choose(huge, splat(INFINITY), choose(tiny, vf{}, scaled));
  return choose(x == x, bounded, x);
}
#endif

// 1 / x to an ulp or two; x is normal, infinite or NaN.
inline vf reciprocal(vf x) {
#ifdef ASTRAI_AVX512
  // VDIVPS holds its port for 16 cycles; an estimate of 14 bits and a step of Newton's take a quarter of that. The step
  // is infinity times 0 where x is infinite; the estimate is right there.
  const __m512 guess = _mm512_rcp14_ps((__m512)x);
  const __m512 better = _mm512_fmadd_ps(guess, _mm512_fnmadd_ps((__m512)x, guess, _mm512_set1_ps(1.0f)), guess);
  return (vf)_mm512_mask_mov_ps(better, _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(INFINITY), _CMP_EQ_OQ), guess);
#else
  return 1.0f / x;
#endif
}

constexpr float kLog2E = 1.44269504088896f;

inline vf exp(vf x) { return exp2(x * kLog2E); }
inline vf tanh(vf x) { return 1.0f - 2.0f * reciprocal(exp2(x * (2.0f * kLog2E)) + 1.0f); }
inline vf silu(vf x) { return x * reciprocal(1.0f + exp2(x * -kLog2E)); }
inline vf gelu_tanh(vf x) {
  return 0.5f * x * (1.0f + tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

}  // namespace astrai
