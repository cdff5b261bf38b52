// Attention of the one row of a decoding request on the matrix unit, split by keys as in attend_row.h.
//
// Keys are the rows of an operand where they lie, 16 slots in a row of the pool at a time, and query heads the columns
// of the other: nothing of K is packed. Pairs of values are interleaved on the way. In the second cache a key and
// value of 64 take 7 ns for up to 16 query heads, where attend_split takes 16 for three; memory needs 19. Tried:
// fetching the keys of the next split meanwhile, into either cache. The machine's own prefetchers do no worse.
#pragma once

#include "attend_row.h"
#include "attend_rows_amx.h"

#if defined(__AMX_BF16__) && defined(ASTRAI_AVX512)

namespace astrai {

constexpr int kColumnHeads = 16;

struct SplitScratch {
  alignas(64) bf16 q[kMaxHeadDim / 32][16 * 32];        // [steps of 32 d][16 pairs of d][16 heads][2]
  alignas(64) bf16 copy[16 * kMaxHeadDim];              // 16 keys that do not lie in a row
  alignas(64) float columns[kSplitKeys][kColumnHeads];  // scores
  alignas(64) float s[4][kSplitKeys];                   // of four heads
  alignas(64) bf16 p[kColumnHeads][kSplitKeys];         // weights
  alignas(64) bf16 values[4][16 * 32];                  // [64 d / 16][16 pairs of keys][16 d][2]
  alignas(64) float out[kColumnHeads][64];
  alignas(64) int32_t slots[kSplitKeys];
};

// q[heads][head_dim] as columns, heads from `heads` on zeros.
inline void pack_queries(SplitScratch& scratch, const float* q, int heads, int64_t head_dim, float scale) {
  for (int64_t d = 0; d < head_dim; d += 32) {
    __m512i line[16];
    for (int h = 0; h < 16; ++h) {
      line[h] = _mm512_setzero_si512();
      if (h >= heads) continue;
      const float* x = q + h * head_dim + d;
      line[h] = (__m512i)_mm512_cvtne2ps_pbh((__m512)(load(x + 16) * scale), (__m512)(load(x) * scale));
    }
    transpose_words(line);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(scratch.q[d / 32] + i * 32, line[i]);
  }
}

// Where the 16 keys of `slots` are, as rows `stride` elements apart; masked ones, which may hold NaN, are copied as
// zeros.
inline const bf16* find_rows(SplitScratch& scratch, const bf16* rows, int64_t slot_stride, const int32_t* slots,
                             int64_t head_dim, int64_t& stride) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i wanted = _mm512_add_epi32(_mm512_set1_epi32(slots[0]), lane);
  if (slots[0] >= 0 && _mm512_cmpneq_epi32_mask(_mm512_load_si512(slots), wanted) == 0) {
    stride = slot_stride;
    return rows + slots[0] * slot_stride;
  }
  stride = head_dim;
  for (int j = 0; j < 16; ++j) {
    for (int64_t d = 0; d < head_dim; d += 32) {
      const __m512i line =
          slots[j] < 0 ? _mm512_setzero_si512() : _mm512_loadu_si512(rows + slots[j] * slot_stride + d);
      _mm512_store_si512(scratch.copy + j * head_dim + d, line);
    }
  }
  return scratch.copy;
}

// columns[16 keys][16 heads] of the keys from j on.
inline void score_columns(SplitScratch& scratch, const Keys<bf16>& cache, int j, int64_t head_dim) {
  int64_t stride;
  const bf16* k = find_rows(scratch, cache.k, cache.slot_stride, scratch.slots + j, head_dim, stride);
  settle_stores();
  _tile_zero(0);
  for (int64_t d = 0; d < head_dim; d += 32) {
    _tile_loadd(4, k + d, stride * 2);
    _tile_loadd(5, scratch.q[d / 32], 64);
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_stored(0, scratch.columns[j], kColumnHeads * 4);
}

// s[4][16 keys] = columns of four heads.
inline void turn_columns(SplitScratch& scratch, int j, int head) {
  __m512 quad[4];
  for (int i = 0; i < 4; ++i) {
    // 128-bit lane l of quad[i]: the four heads of key 4 * l + i.
    const auto key = [&](int l) { return _mm_load_ps(scratch.columns[j + 4 * l + i] + head); };
    quad[i] = _mm512_castps128_ps512(key(0));
    quad[i] = _mm512_insertf32x4(quad[i], key(1), 1);
    quad[i] = _mm512_insertf32x4(quad[i], key(2), 2);
    quad[i] = _mm512_insertf32x4(quad[i], key(3), 3);
  }
  const __m512 a = _mm512_unpacklo_ps(quad[0], quad[1]), b = _mm512_unpackhi_ps(quad[0], quad[1]);
  const __m512 c = _mm512_unpacklo_ps(quad[2], quad[3]), d = _mm512_unpackhi_ps(quad[2], quad[3]);
  _mm512_store_ps(scratch.s[0] + j, _mm512_shuffle_ps(a, c, 0x44));
  _mm512_store_ps(scratch.s[1] + j, _mm512_shuffle_ps(a, c, 0xee));
  _mm512_store_ps(scratch.s[2] + j, _mm512_shuffle_ps(b, d, 0x44));
  _mm512_store_ps(scratch.s[3] + j, _mm512_shuffle_ps(b, d, 0xee));
}

// values[d / 16] = pairs of 32 keys from j on, of up to 64 d.
inline void pack_values(SplitScratch& scratch, const Keys<bf16>& cache, int j, int64_t d, int64_t width) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512i low = _mm512_load_si512(kPairsLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int i = 0; i < 32; i += 2) {
    const int32_t even = scratch.slots[j + i], odd = scratch.slots[j + i + 1];
    for (int64_t c = 0; c < width; c += 32) {
      const __m512i a = even < 0 ? zero : _mm512_loadu_si512(cache.v + even * cache.slot_stride + d + c);
      const __m512i b = odd < 0 ? zero : _mm512_loadu_si512(cache.v + odd * cache.slot_stride + d + c);
      _mm512_store_si512(scratch.values[c / 16] + i * 16, _mm512_permutex2var_epi16(a, low, b));
      _mm512_store_si512(scratch.values[c / 16 + 1] + i * 16, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

// The weights of one head, 128 of them whatever `padded` is; returns what is known of the row.
inline Running weigh_split(bf16* p, const float* s, int padded, const int32_t* slots, const Scoring& scoring) {
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  __m512 x[8], top = nothing;
  for (int i = 0; i < 8; ++i) {
    x[i] = nothing;
    if (i * 16 >= padded) continue;
    const __mmask16 seen = _mm512_cmpge_epi32_mask(_mm512_load_si512(slots + i * 16), _mm512_setzero_si512());
    x[i] = (__m512)_mm512_load_ps(s + i * 16);
    if (scoring.softcap != 0.0f) x[i] = (__m512)score((vf)x[i], scoring);
    x[i] = _mm512_mask_mov_ps(nothing, seen, x[i]);
    // Not the other way around: a NaN must reach the sum, and does through the weights.
    top = _mm512_max_ps(x[i], top);
  }
  const float reached = _mm512_reduce_max_ps(top);
  const vf base = splat(reached == -INFINITY ? 0.0f : reached);
  vf total = {};
  for (int i = 0; i < 8; i += 2) {
    const vf a = exp2<4>((vf)x[i] - base), b = exp2<4>((vf)x[i + 1] - base);
    total += a + b;
    _mm512_store_si512(p + i * 16, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
  }
  return {reached, sum_lanes(total)};
}

// parts[..][d .. d + width) of the heads in p: weights times values. width is 32 or 64.
inline void weigh_values_amx(float* parts, int64_t stride, SplitScratch& scratch, const Keys<bf16>& cache, int padded,
                             int heads, int64_t d, int64_t width) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int j = 0; j < padded; j += 32) {
    pack_values(scratch, cache, j, d, width);
    settle_stores();
    _tile_loadd(4, scratch.p[0] + j, kSplitKeys * 2);
    _tile_loadd(5, scratch.values[0], 64);
    _tile_loadd(6, scratch.values[1], 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    if (width == 32) continue;
    _tile_loadd(5, scratch.values[2], 64);
    _tile_loadd(6, scratch.values[3], 64);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 6);
  }
  _tile_stored(0, scratch.out[0], 64 * 4);
  _tile_stored(1, scratch.out[0] + 16, 64 * 4);
  _tile_stored(2, scratch.out[0] + 32, 64 * 4);
  _tile_stored(3, scratch.out[0] + 48, 64 * 4);
  settle_stores();
  for (int h = 0; h < heads; ++h) {
    for (int64_t c = 0; c < width; c += 16) store(parts + h * stride + d + c, load(scratch.out[h] + c));
  }
}

// As attend_split; head_dim is a multiple of 32.
inline void attend_split_amx(float* parts, const float* q, const Keys<bf16>& cache, const Scoring& scoring, int64_t lo,
                             int64_t hi, int64_t group, int64_t head_dim) {
  SplitScratch scratch;
  const int count = int(hi - lo), padded = int(round_up(count, 32));
  for (int j = 0; j < padded; ++j) scratch.slots[j] = j < count ? cache.slots[lo + j] : -1;
  const int64_t stride = part_stride(head_dim);
  const float q_scale = scoring.softcap == 0.0f ? scoring.scale : 1.0f;
  for (int64_t first = 0; first < group; first += kColumnHeads) {
    const int heads = int(std::min<int64_t>(kColumnHeads, group - first));
    pack_queries(scratch, q + first * head_dim, heads, head_dim, q_scale);
    for (int j = 0; j < padded; j += 16) score_columns(scratch, cache, j, head_dim);
    settle_stores();
    for (int head = 0; head < heads; head += 4) {
      for (int j = 0; j < padded; j += 16) turn_columns(scratch, j, head);
      for (int h = head; h < std::min(heads, head + 4); ++h) {
        const Running row = weigh_split(scratch.p[h], scratch.s[h - head], padded, scratch.slots, scoring);
        parts[(first + h) * stride + head_dim] = row.top;
        parts[(first + h) * stride + head_dim + 1] = row.total;
      }
    }
    for (int64_t d = 0; d < head_dim; d += 64) {
      const int64_t width = std::min<int64_t>(64, head_dim - d);
      weigh_values_amx(parts + first * stride, stride, scratch, cache, padded, heads, d, width);
    }
  }
}

}  // namespace astrai

#endif
