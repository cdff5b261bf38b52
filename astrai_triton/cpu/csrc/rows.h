// What is done to one row: norms, rotary, and the way of K and V into the cache.
#pragma once

#include "layout.h"

namespace astrai {

// 1 / rms of x[n], n a multiple of kWidth; `count` of them are real, the rest are zero.
inline float inverse_rms(const float* x, int64_t n, int64_t count, float eps) {
  vf total[2] = {};
  for (int64_t i = 0; i < n; i += 2 * kWidth) {
    const vf a = load(x + i), b = load(x + i + kWidth);
    total[0] += a * a;
    total[1] += b * b;
  }
  return 1.0f / std::sqrt(sum_lanes(total[0] + total[1]) / float(count) + eps);
}

// out = x / rms(x) * gain. x and gain hold n values, a multiple of 32, zero from `count` on.
template <class Act>
inline void norm_row(Act* out, const float* x, const float* gain, int64_t n, int64_t count, float eps) {
  const float scale = inverse_rms(x, n, count, eps);
  for (int64_t i = 0; i < n; i += kWidth) store(out + i, load(x + i) * scale * load(gain + i));
}

// residual += x / rms(x) * gain.
inline void add_normed_row(float* residual, const float* x, const float* gain, int64_t n, int64_t count, float eps) {
  const float scale = inverse_rms(x, n, count, eps);
  for (int64_t i = 0; i < n; i += kWidth) {
    store(residual + i, load(residual + i) + load(x + i) * scale * load(gain + i));
  }
}

inline void norm_head(float* x, const float* gain, int64_t head_dim, float eps) {
  float total = 0;
  for (int64_t i = 0; i < head_dim; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / float(head_dim) + eps);
  for (int64_t i = 0; i < head_dim; ++i) x[i] = x[i] * scale * gain[i];
}

// The angles of one position, laid out so that a rotation is out[i] = x[i] * cosine[i] + x[partner] * sine[i].
struct Turn {
  static constexpr int64_t kMaxDim = 1024;
  int64_t dim = 0;
  bool adjacent = false;
  alignas(64) float cosine[kMaxDim], sine[kMaxDim];

  // table: [dim / 2, 2], (cos, sin).
  void set(const float* table, int64_t rotary_dim, bool is_adjacent) {
    dim = rotary_dim;
    adjacent = is_adjacent;
    const int64_t half = dim / 2, second = adjacent ? 1 : half, step = adjacent ? 2 : 1;
    for (int64_t i = 0; i < half; ++i) {
      cosine[i * step] = cosine[i * step + second] = table[2 * i];
      sine[i * step] = -table[2 * i + 1];
      sine[i * step + second] = table[2 * i + 1];
    }
  }

  void rotate(float* x) const {
    const int64_t half = dim / 2;
    int64_t i = 0;
    if (adjacent) {
      for (; i + kWidth <= dim; i += kWidth) {
        const vf v = load(x + i);
        store(x + i, v * load(cosine + i) + swap_neighbours(v) * load(sine + i));
      }
      for (; i < dim; i += 2) rotate_pair(x, i, i + 1);
      return;
    }
    for (; i + kWidth <= half; i += kWidth) {
      const vf a = load(x + i), b = load(x + half + i);
      store(x + i, a * load(cosine + i) + b * load(sine + i));
      store(x + half + i, b * load(cosine + half + i) + a * load(sine + half + i));
    }
    for (; i < half; ++i) rotate_pair(x, i, i + half);
  }

 private:
  void rotate_pair(float* x, int64_t i, int64_t j) const {
    const float a = x[i], b = x[j];
    x[i] = a * cosine[i] + b * sine[i];
    x[j] = b * cosine[j] + a * sine[j];
  }

  static vf swap_neighbours(vf v) {
#if defined(ASTRAI_AVX512)
    return (vf)_mm512_permute_ps((__m512)v, 0xb1);
#else
    vf out;
    for (int i = 0; i < kWidth; ++i) out[i] = v[i ^ 1];
    return out;
#endif
  }
};

template <class T>
inline void convert_row(T* out, const float* x, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(out + i, load(x + i));
  for (; i < count; ++i) put(out + i, x[i]);
}

}  // namespace astrai
