// Attention of the one row of a decoding request, split by keys.
//
// A key costs 2 * head_dim elements of memory traffic and, for each of the query heads that share it, 2 * head_dim
// multiply-adds: at 16 GB/s a core that is 16 ns and, with 3 heads of 64, some 40 vector instructions. So keys are
// widened to float32 on the way, and nothing is packed.
#pragma once

#include "attend.h"
#include "block.h"

namespace astrai {

// What one split knows of one query head: top, total, then output[head_dim] relative to 2^top.
inline int64_t part_stride(int64_t head_dim) { return round_up(head_dim + 2, 16); }

#if defined(ASTRAI_AVX512)
// out[i] is the sum of the lanes of v[i], for 16 of them. 15 steps of two shuffles and an addition, not 16 of 8.
inline void store_sums(float* out, const vf* v) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 x = (__m512)v[i], y = (__m512)v[i + 8];
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
  }
  // The 128-bit lanes of b[i] hold what is left to add of v[i], v[i + 8], v[i + 4], v[i + 12].
  for (int i = 0; i < 2; ++i) {
    c[i] = _mm512_add_ps(_mm512_unpacklo_ps(b[i], b[i + 2]), _mm512_unpackhi_ps(b[i], b[i + 2]));
  }
  const __m512 d = _mm512_add_ps(_mm512_unpacklo_ps(c[0], c[1]), _mm512_unpackhi_ps(c[0], c[1]));
  const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
  _mm512_storeu_ps(out, _mm512_permutexvar_ps(order, d));
}
#else
inline void store_sums(float* out, const vf* v) {
  for (int i = 0; i < 16; ++i) out[i] = sum_lanes(v[i]);
}
#endif

// s[16] = q * k of 16 keys, V vectors each.
template <int V, class T>
inline void score_keys(float* s, const float* q, const T* const* k) {
  vf acc[16], line[V];
  for (int i = 0; i < V; ++i) line[i] = load(q + i * kWidth);
  for (int j = 0; j < 16; ++j) {
    acc[j] = line[0] * load(k[j]);
    for (int i = 1; i < V; ++i) acc[j] += line[i] * load(k[j] + i * kWidth);
  }
  store_sums(s, acc);
}

// The same for any head_dim that is a multiple of kWidth.
template <class T>
inline void score_keys(float* s, const float* q, const T* const* k, int64_t head_dim) {
  switch (head_dim / kWidth) {
    case 4: return score_keys<4>(s, q, k);
    case 8: return score_keys<8>(s, q, k);
    default: break;
  }
  vf acc[16];
  for (int j = 0; j < 16; ++j) {
    vf sum = {};
    for (int64_t d = 0; d < head_dim; d += kWidth) sum += load(q + d) * load(k[j] + d);
    acc[j] = sum;
  }
  store_sums(s, acc);
}

// Queries as score_keys takes them. bfloat16 keys meet bfloat16 queries where the machine multiplies them so: two
// loads and two VDPBF16PS for 64 elements instead of four loads, conversions and multiply-adds each.
template <class T>
struct Queries {
  Queries(const float* q, int64_t, int64_t head_dim) : q_(q), head_dim_(head_dim) {}
  void score(float* s, int64_t head, const T* const* k) const { score_keys(s, q_ + head * head_dim_, k, head_dim_); }

 private:
  const float* q_;
  const int64_t head_dim_;
};

#if defined(__AVX512BF16__)
template <>
struct Queries<bf16> {
  Queries(const float* q, int64_t heads, int64_t head_dim) : source_(q), head_dim_(head_dim) {
    is_paired_ = head_dim % 32 == 0 && heads * head_dim <= kMost;
    if (!is_paired_) return;
    for (int64_t i = 0; i < heads * head_dim; i += kWidth) store(q_ + i, load(q + i));
  }

  void score(float* s, int64_t head, const bf16* const* k) const {
    if (!is_paired_) return score_keys(s, source_ + head * head_dim_, k, head_dim_);
    switch (head_dim_ / 32) {
      case 2: return multiply<2>(s, q_ + head * head_dim_, k);
      case 4: return multiply<4>(s, q_ + head * head_dim_, k);
      default: break;
    }
    vf acc[16];
    for (int j = 0; j < 16; ++j) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t d = 0; d < head_dim_; d += 32) {
        sum = _mm512_dpbf16_ps(sum, line(q_ + head * head_dim_ + d), line(k[j] + d));
      }
      acc[j] = (vf)sum;
    }
    store_sums(s, acc);
  }

 private:
  static constexpr int64_t kMost = 8 * kMaxHeadDim;
  static __m512bh line(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

  template <int V>
  static void multiply(float* s, const bf16* q, const bf16* const* k) {
    vf acc[16];
    __m512bh query[V];
    for (int i = 0; i < V; ++i) query[i] = line(q + i * 32);
    for (int j = 0; j < 16; ++j) {
      __m512 sum = _mm512_dpbf16_ps(_mm512_setzero_ps(), query[0], line(k[j]));
      for (int i = 1; i < V; ++i) sum = _mm512_dpbf16_ps(sum, query[i], line(k[j] + i * 32));
      acc[j] = (vf)sum;
    }
    store_sums(s, acc);
  }

  const float* source_;
  const int64_t head_dim_;
  bool is_paired_;
  alignas(64) bf16 q_[kMost];
};
#endif

// out[H][D lanes] = p[H][count] * v, for H heads and V vectors of the head.
template <int H, int V, class T>
inline void weigh_values(float* out, int64_t out_stride, const float* p, const T* const* v, int count, int64_t d) {
  vf acc[H][V] = {};
  for (int j = 0; j < count; ++j) {
    vf line[V];
    for (int i = 0; i < V; ++i) line[i] = load(v[j] + d + i * kWidth);
    for (int h = 0; h < H; ++h) {
      for (int i = 0; i < V; ++i) acc[h][i] += line[i] * p[h * kSplitKeys + j];
    }
  }
  for (int h = 0; h < H; ++h) {
    for (int i = 0; i < V; ++i) store(out + h * out_stride + d + i * kWidth, acc[h][i]);
  }
}

// Rows of other heads lie between those of one, which no prefetcher of the machine guesses.
template <class T>
inline void prefetch_rows(const T* const* rows, int count, int64_t head_dim) {
  for (int j = 0; j < count; ++j) {
    for (int64_t d = 0; d < head_dim; d += 64 / int64_t(sizeof(T))) prefetch(rows[j] + d);
  }
}

// parts[group][part_stride] of the keys [lo, hi) of a split, at most 128 of them. q: [group, head_dim].
// head_dim is a multiple of 16.
template <class T>
inline void attend_split(float* parts, const float* q, const Keys<T>& cache, const Scoring& scoring, int64_t lo,
                         int64_t hi, int64_t group, int64_t head_dim) {
  static const T kZeros[kMaxHeadDim] = {};
  constexpr int kHeads = 4;
  const int count = int(hi - lo), padded = int(round_up(count, 16));
  const T* k[kSplitKeys];
  const T* v[kSplitKeys];
  alignas(64) int32_t slots[kSplitKeys];
  for (int j = 0; j < padded; ++j) {
    slots[j] = j < count ? cache.slots[lo + j] : -1;
    // A masked slot may hold NaN.
    k[j] = slots[j] < 0 ? kZeros : cache.k + slots[j] * cache.slot_stride;
    v[j] = slots[j] < 0 ? kZeros : cache.v + slots[j] * cache.slot_stride;
  }
  const Queries<T> queries(q, group, head_dim);
  prefetch_rows(k, std::min(padded, 16), head_dim);
  const int64_t stride = part_stride(head_dim);
  alignas(64) float weights[kHeads * kSplitKeys];
  for (int64_t head = 0; head < group; head += kHeads) {
    const int heads = int(std::min<int64_t>(kHeads, group - head));
    for (int j = 0; j < padded; j += 16) {
      if (head == 0) prefetch_rows(k + j + 16, std::min(padded - j - 16, 16), head_dim);
      if (head == 0) prefetch_rows(v + j, 16, head_dim);
      for (int h = 0; h < heads; ++h) queries.score(weights + h * kSplitKeys + j, head + h, k + j);
    }
    for (int h = 0; h < heads; ++h) {
      Running row{-INFINITY, 0.0f};
      softmax_step(weights + h * kSplitKeys, padded, 0, count, slots, scoring, row);
      parts[(head + h) * stride + head_dim] = row.top;
      parts[(head + h) * stride + head_dim + 1] = row.total;
    }
    float* out = parts + head * stride;
    constexpr int kVectors = 64 / kWidth > 4 ? 2 : 4;
    for (int64_t d = 0; d < head_dim;) {
      const bool wide = d + kVectors * kWidth <= head_dim;
      with_rows<kHeads>(heads, [&](auto fixed) {
        constexpr int H = decltype(fixed)::value;
        if (wide) {
          weigh_values<H, kVectors>(out, stride, weights, v, count, d);
        } else {
          weigh_values<H, 1>(out, stride, weights, v, count, d);
        }
      });
      d += wide ? kVectors * kWidth : kWidth;
    }
  }
}

// out[head_dim] of one query head from its splits, `split_stride` floats apart, in their order.
template <class Act>
inline void merge_splits(Act* out, const float* parts, int64_t splits, int64_t split_stride, const Scoring& scoring,
                         int64_t head, int64_t head_dim) {
  Running row;
  row.start(scoring, head);
  float top = row.top;
  for (int64_t i = 0; i < splits; ++i) top = std::max(top, parts[i * split_stride + head_dim]);
  const float base = top == -INFINITY ? 0.0f : top;
  float total = row.total == 0.0f ? 0.0f : exp2_one(row.top - base);
  for (int64_t i = 0; i < splits; ++i) {
    const float* part = parts + i * split_stride;
    total += part[head_dim + 1] * exp2_one(part[head_dim] - base);
  }
  const float scale = total == 0.0f ? 0.0f : 1.0f / total;
  for (int64_t d = 0; d < head_dim; d += kWidth) {
    vf sum = {};
    for (int64_t i = 0; i < splits; ++i) {
      const float* part = parts + i * split_stride;
      sum += load(part + d) * (exp2_one(part[head_dim] - base) * scale);
    }
    store(out + d, sum);
  }
}

}  // namespace astrai
