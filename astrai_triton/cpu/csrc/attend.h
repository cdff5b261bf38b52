// Attention of some rows of one request over its keys, which lie anywhere in the pool.
//
// Scores are base 2: the scale carries log2(e). The query heads that share a K/V head are rows of one problem, so
// that keys are read once for all of them. What exists in which form:
//
//   one row of a request    attend_row_amx.h in bfloat16 where there is AMX, attend_row.h else: split by keys, 128 at
//                           a time, straight from the pool
//   several rows            attend_rows_amx.h in bfloat16 where there is AMX, attend_rows else: blocks of rows
//                           against packed blocks of 64 keys
//
// Splits and blocks are cut at fixed keys, whatever else runs, so that a row has the same bits in any company.
#pragma once

#include <algorithm>

#include "layout.h"

namespace astrai {

constexpr int kKeyBlock = 64;
constexpr int kSplitKeys = 128;
constexpr int kMaxHeadDim = 512;
constexpr int kMaxRows = 128;  // (position, query head) pairs of a block of rows

// One request and one K/V head as attention sees it.
template <class T>
struct Keys {
  const T *k, *v;       // of this layer and head, at slot 0
  int64_t slot_stride;  // elements
  const int32_t* slots;  // position -> slot, negative: masked
};

struct Scoring {
  float scale;          // softmax_scale, without softcap times log2(e)
  float softcap;        // 0 is off
  const float* sinks;   // [n_q_heads] or null
  int64_t window;       // keys a row sees, -1 is all

  int64_t first_key(int64_t position) const { return window < 0 ? 0 : std::max<int64_t>(0, position - window + 1); }
};

inline float exp2_one(float x) { return exp2(splat(x))[0]; }

// Raw products to base-2 scores.
inline vf score(vf product, const Scoring& scoring) {
  const vf s = product * scoring.scale;
  return scoring.softcap == 0.0f ? s : tanh(s / scoring.softcap) * (scoring.softcap * kLog2E);
}

// What is known of a row so far: output is un-normalised, relative to 2^top.
struct Running {
  float top, total;

  void start(const Scoring& scoring, int64_t head) {
    top = scoring.sinks ? scoring.sinks[head] * kLog2E : -INFINITY;
    total = scoring.sinks ? 1.0f : 0.0f;
  }
  float inverse_total() const { return total == 0.0f ? 0.0f : 1.0f / total; }
};

// Products s[count], count a multiple of kWidth, become weights; lanes outside [lo, hi) and those whose slot is
// negative become 0. Returns by how much earlier output shrinks.
inline float softmax_step(float* s, int count, int lo, int hi, const int32_t* slots, const Scoring& scoring,
                          Running& row) {
  vi lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  vf top = splat(-INFINITY);
  for (int j = 0; j < count; j += kWidth) {
    vi slot;
    std::memcpy(&slot, slots + j, sizeof slot);
    const vi seen = (lane + j >= lo) & (lane + j < hi) & (slot >= 0);
    const vf x = choose(seen, score(load(s + j), scoring), splat(-INFINITY));
    store(s + j, x);
    // Not maximum(): a NaN must reach the sum, and does through the weights.
    top = maximum(x, top);
  }
  const float reached = std::max(row.top, max_lanes(top));
  const float base = reached == -INFINITY ? 0.0f : reached;
  vf total = {};
  for (int j = 0; j < count; j += kWidth) {
    const vf weight = exp2(load(s + j) - base);
    store(s + j, weight);
    total += weight;
  }
  const float shrink = row.top == reached ? 1.0f : exp2_one(row.top - base);
  row.total = row.total * shrink + sum_lanes(total);
  row.top = reached;
  return shrink;
}

template <class T>
inline void widen_row(float* out, const T* in, int64_t count, int64_t padded) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(out + i, load(in + i));
  for (; i < count; ++i) out[i] = widen(in[i]);
  for (; i < padded; ++i) out[i] = 0.0f;
}

// Scratch of attend_rows, in floats. Stride: head_dim up to whole 16 lanes.
inline int64_t attend_rows_floats(int64_t head_dim) {
  const int64_t stride = round_up(head_dim, 16);
  return 2 * kMaxRows * stride + 2 * kKeyBlock * stride + kMaxRows * kKeyBlock;
}

// s[R][64] = q[R][dim] * keys[dim][64], keys of stride 64.
template <int R>
inline void multiply_keys(float* s, const float* q, int64_t stride, const float* keys, int64_t dim) {
  constexpr int kVectors = kWidth == 16 ? 4 : 2;
  for (int j = 0; j < kKeyBlock; j += kVectors * kWidth) {
    vf acc[R][kVectors] = {};
    for (int64_t d = 0; d < dim; ++d) {
      vf line[kVectors];
      for (int v = 0; v < kVectors; ++v) line[v] = load(keys + d * kKeyBlock + j + v * kWidth);
      for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVectors; ++v) acc[r][v] += line[v] * q[r * stride + d];
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) store(s + r * kKeyBlock + j + v * kWidth, acc[r][v]);
    }
  }
}

// out[R][stride] += p[R][64] * values[64][stride].
template <int R>
inline void add_values(float* out, const float* p, const float* values, int64_t stride) {
  for (int64_t d = 0; d < stride; d += kWidth) {
    vf acc[R];
    for (int r = 0; r < R; ++r) acc[r] = load(out + r * stride + d);
    for (int j = 0; j < kKeyBlock; ++j) {
      const vf line = load(values + j * stride + d);
      for (int r = 0; r < R; ++r) acc[r] += line * p[r * kKeyBlock + j];
    }
    for (int r = 0; r < R; ++r) store(out + r * stride + d, acc[r]);
  }
}

// K and V of 64 keys from `first` on, those from `count` on and masked ones as zeros: a masked slot may hold
// anything, and 0 times NaN is NaN.
template <class T>
inline void gather_keys(float* keys, float* values, const Keys<T>& cache, int64_t first, int count, int64_t head_dim,
                        int64_t stride, int32_t* slots) {
  for (int j = 0; j < kKeyBlock; ++j) {
    slots[j] = j < count ? cache.slots[first + j] : -1;
    float* value = values + j * stride;
    if (slots[j] < 0) {
      for (int64_t d = 0; d < stride; ++d) value[d] = 0.0f;
      for (int64_t d = 0; d < head_dim; ++d) keys[d * kKeyBlock + j] = 0.0f;
      continue;
    }
    const int64_t place = slots[j] * cache.slot_stride;
    widen_row(value, cache.v + place, head_dim, stride);
    for (int64_t d = 0; d < head_dim; ++d) keys[d * kKeyBlock + j] = widen(cache.k[place + d]);
  }
}

// Rows of `count` positions from `position` on, `group` query heads each, against all keys they see.
//
// q: [count] of stride q_stride, [group, head_dim] each; out likewise. first_head: of sinks.
template <class T, class Act>
inline void attend_rows(Act* out, int64_t out_stride, const float* q, int64_t q_stride, const Keys<T>& cache,
                        const Scoring& scoring, int64_t position, int64_t count, int64_t group, int64_t head_dim,
                        int64_t first_head, float* scratch) {
  const int64_t stride = round_up(head_dim, 16);
  const int rows = int(count * group);
  float* queries = scratch;
  float* outputs = queries + kMaxRows * stride;
  float* keys = outputs + kMaxRows * stride;
  float* values = keys + kKeyBlock * stride;
  float* weights = values + kKeyBlock * stride;
  Running running[kMaxRows];
  alignas(64) int32_t slots[kKeyBlock];
  for (int r = 0; r < rows; ++r) {
    running[r].start(scoring, first_head + r % group);
    widen_row(queries + r * stride, q + r / group * q_stride + r % group * head_dim, head_dim, stride);
    std::fill(outputs + r * stride, outputs + (r + 1) * stride, 0.0f);
  }
  const int64_t last = position + count;
  for (int64_t key = scoring.first_key(position) / kKeyBlock * kKeyBlock; key < last; key += kKeyBlock) {
    gather_keys(keys, values, cache, key, int(std::min<int64_t>(kKeyBlock, last - key)), head_dim, stride, slots);
    for (int r = 0; r < rows; r += 4) {
      const int some = std::min(4, rows - r);
      float* s = weights + r * kKeyBlock;
      const float* some_q = queries + r * stride;
      if (some == 4) {
        multiply_keys<4>(s, some_q, stride, keys, head_dim);
      } else {
        for (int i = 0; i < some; ++i) multiply_keys<1>(s + i * kKeyBlock, some_q + i * stride, stride, keys, head_dim);
      }
      for (int i = 0; i < some; ++i) {
        const int64_t at = position + (r + i) / group;
        const int lo = int(std::max<int64_t>(0, scoring.first_key(at) - key));
        const int hi = int(std::min<int64_t>(kKeyBlock, at + 1 - key));
        const float shrink = softmax_step(s + i * kKeyBlock, kKeyBlock, lo, hi, slots, scoring, running[r + i]);
        if (shrink != 1.0f) {
          float* o = outputs + (r + i) * stride;
          for (int64_t d = 0; d < stride; d += kWidth) store(o + d, load(o + d) * shrink);
        }
      }
      float* o = outputs + r * stride;
      if (some == 4) {
        add_values<4>(o, s, values, stride);
      } else {
        for (int i = 0; i < some; ++i) add_values<1>(o + i * stride, s + i * kKeyBlock, values, stride);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    Act* place = out + r / group * out_stride + r % group * head_dim;
    const float scale = running[r].inverse_total();
    for (int64_t d = 0; d < head_dim; ++d) put(place + d, outputs[r * stride + d] * scale);
  }
}

}  // namespace astrai
