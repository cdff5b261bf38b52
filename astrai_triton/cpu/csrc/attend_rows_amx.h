// Attention of several rows of a request on the matrix unit, in bfloat16.
//
// Up to 128 rows, (position, query head) pairs, go against blocks of 64 keys, as in attend_rows. Q, K, V and the
// weights are tiles; scores and output stay float32 in the first two caches: with 96 rows of 64, Q 12 KiB, output
// 24, scores 24, weights 12, K and V 8 each. Packing K and V of a block takes some 1000 instructions, its softmax over
// 96 rows ten times that, so every block of rows packs for itself, from wherever the slots lie.
#pragma once

#include "attend.h"
#include "block_amx.h"

#if defined(__AMX_BF16__) && defined(ASTRAI_AVX512)

namespace astrai {

// [i][j] -> [j][i] of 16 x 16 words of 32 bits.
inline void transpose_words(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Scratch, in bytes, of attend_rows_amx; head_dim is a multiple of 32.
inline int64_t attend_rows_amx_bytes(int64_t head_dim) {
  return kMaxRows * head_dim * (2 + 4) + 2 * kKeyBlock * head_dim * 2 + kMaxRows * kKeyBlock * (2 + 4);
}

struct AmxScratch {
  AmxScratch(void* bytes, int64_t head_dim) {
    q = static_cast<bf16*>(bytes);
    keys = q + kMaxRows * head_dim;
    values = keys + kKeyBlock * head_dim;
    p = values + kKeyBlock * head_dim;
    out = reinterpret_cast<float*>(p + kMaxRows * kKeyBlock);
    s = out + kMaxRows * head_dim;
  }
  bf16* q;       // [rows][head_dim]
  bf16* keys;    // [head_dim / 32][4 tiles of 16 keys][16 pairs of d][16 keys][2]
  bf16* values;  // [2 steps of 32 keys][head_dim / 16 tiles][16 pairs of keys][16 d][2]
  bf16* p;       // [rows][64]
  float* out;    // [rows][head_dim]
  float* s;      // [rows][64]
};

// Pairs of keys side by side: element 2i of a result is d = i of the even key, 2i + 1 of the odd one.
alignas(64) constexpr uint16_t kPairsLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};

// The block of K and V that begins at key `first`; keys from `count` on and masked ones are zeros.
inline void pack_keys(const AmxScratch& scratch, const Keys<bf16>& cache, int64_t first, int count, int64_t head_dim,
                      int32_t* slots) {
  const __m512i zero = _mm512_setzero_si512();
  for (int j = 0; j < kKeyBlock; ++j) slots[j] = j < count ? cache.slots[first + j] : -1;
  for (int tile = 0; tile < 4; ++tile) {
    for (int64_t d = 0; d < head_dim; d += 32) {
      __m512i line[16];
      for (int j = 0; j < 16; ++j) {
        const int32_t slot = slots[tile * 16 + j];
        line[j] = slot < 0 ? zero : _mm512_loadu_si512(cache.k + slot * cache.slot_stride + d);
      }
      transpose_words(line);
      bf16* place = scratch.keys + (d / 32 * 4 + tile) * 512;
      for (int j = 0; j < 16; ++j) _mm512_store_si512(place + j * 32, line[j]);
    }
  }
  const __m512i low = _mm512_load_si512(kPairsLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const int64_t tiles = head_dim / 16;
  for (int j = 0; j < kKeyBlock; j += 2) {
    const int32_t even = slots[j], odd = slots[j + 1];
    bf16* place = scratch.values + (j / 32 * tiles) * 512 + j % 32 / 2 * 32;
    for (int64_t d = 0; d < head_dim; d += 32) {
      const __m512i a = even < 0 ? zero : _mm512_loadu_si512(cache.v + even * cache.slot_stride + d);
      const __m512i b = odd < 0 ? zero : _mm512_loadu_si512(cache.v + odd * cache.slot_stride + d);
      _mm512_store_si512(place + d / 16 * 512, _mm512_permutex2var_epi16(a, low, b));
      _mm512_store_si512(place + (d / 16 + 1) * 512, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

// s[32 rows][64] = q[32][head_dim] * keys.
inline void multiply_keys_amx(float* s, const bf16* q, const bf16* keys, int64_t head_dim) {
  settle_stores();
  for (int pair = 0; pair < 4; pair += 2) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < head_dim; d += 32) {
      const bf16* k = keys + (d / 32 * 4 + pair) * 512;
      _tile_loadd(4, q + d, head_dim * 2);
      _tile_loadd(5, q + 16 * head_dim + d, head_dim * 2);
      _tile_loadd(6, k, 64);
      _tile_loadd(7, k + 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, s + pair * 16, kKeyBlock * 4);
    _tile_stored(1, s + pair * 16 + 16, kKeyBlock * 4);
    _tile_stored(2, s + 16 * kKeyBlock + pair * 16, kKeyBlock * 4);
    _tile_stored(3, s + 16 * kKeyBlock + pair * 16 + 16, kKeyBlock * 4);
  }
}

// out[32 rows][head_dim] += p[32][64] * values.
inline void add_values_amx(float* out, const bf16* p, const bf16* values, int64_t head_dim) {
  settle_stores();
  const int64_t tiles = head_dim / 16, stride = head_dim * 4;
  for (int64_t tile = 0; tile < tiles; tile += 2) {
    float* place = out + tile * 16;
    _tile_loadd(0, place, stride);
    _tile_loadd(1, place + 16, stride);
    _tile_loadd(2, place + 16 * head_dim, stride);
    _tile_loadd(3, place + 16 * head_dim + 16, stride);
    for (int step = 0; step < 2; ++step) {
      const bf16* v = values + (step * tiles + tile) * 512;
      _tile_loadd(4, p + step * 32, kKeyBlock * 2);
      _tile_loadd(5, p + 16 * kKeyBlock + step * 32, kKeyBlock * 2);
      _tile_loadd(6, v, 64);
      _tile_loadd(7, v + 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, place, stride);
    _tile_stored(1, place + 16, stride);
    _tile_stored(2, place + 16 * head_dim, stride);
    _tile_stored(3, place + 16 * head_dim + 16, stride);
  }
}

// softmax_step for 64 scores that are base 2 already, in four registers; weights go to p as bfloat16. Bit j of `seen`
// is whether key j counts.
inline float softmax_block(bf16* p, const float* s, uint64_t seen, Running& row) {
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  __m512 x[4];
  for (int i = 0; i < 4; ++i) x[i] = _mm512_mask_loadu_ps(nothing, __mmask16(seen >> (16 * i)), s + 16 * i);
  const __m512 top = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
  const float reached = std::max(row.top, _mm512_reduce_max_ps(top));
  const __m512 base = _mm512_set1_ps(reached == -INFINITY ? 0.0f : reached);
  for (int i = 0; i < 4; ++i) x[i] = (__m512)exp2<4>((vf)_mm512_sub_ps(x[i], base));
  // Whole lines: a tile that is loaded soon after can take them from the store buffer.
  _mm512_store_si512(p, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
  _mm512_store_si512(p + 32, (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]));
  const float total = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3])));
  const float shrink = row.top == reached ? 1.0f : exp2_one(row.top - (reached == -INFINITY ? 0.0f : reached));
  row.total = row.total * shrink + total;
  row.top = reached;
  return shrink;
}

// The bits of [lo, hi) that are among 64; either end may lie outside.
inline uint64_t span_bits(int64_t lo, int64_t hi) {
  if (hi <= lo || hi <= 0 || lo >= 64) return 0;
  return (hi >= 64 ? ~uint64_t(0) : (uint64_t(1) << hi) - 1) & (lo <= 0 ? ~uint64_t(0) : ~uint64_t(0) << lo);
}

inline uint64_t present_bits(const int32_t* slots) {
  uint64_t bits = 0;
  for (int j = 0; j < kKeyBlock; ++j) bits |= uint64_t(slots[j] >= 0) << j;
  return bits;
}

// As attend_rows; head_dim is a multiple of 32.
inline void attend_rows_amx(bf16* out, int64_t out_stride, const float* q, int64_t q_stride, const Keys<bf16>& cache,
                            const Scoring& scoring, int64_t position, int64_t count, int64_t group, int64_t head_dim,
                            int64_t first_head, void* bytes) {
  const AmxScratch scratch(bytes, head_dim);
  const int rows = int(count * group), padded = int(round_up(rows, 32));
  Running running[kMaxRows];
  int64_t places[kMaxRows];
  alignas(64) int32_t slots[kKeyBlock];
  // Without a cap the scale is in q, and products are scores.
  const float q_scale = scoring.softcap == 0.0f ? scoring.scale : 1.0f;
  for (int r = 0; r < rows; ++r) {
    running[r].start(scoring, first_head + r % group);
    places[r] = position + r / group;
    const float* source = q + r / group * q_stride + r % group * head_dim;
    for (int64_t d = 0; d < head_dim; d += 16) store(scratch.q + r * head_dim + d, load(source + d) * q_scale);
  }
  // Rows of padding may hold the NaN of an earlier use: harmless, since nobody reads what comes of them.
  std::fill(scratch.out, scratch.out + padded * head_dim, 0.0f);
  const int64_t last = position + count;
  for (int64_t key = scoring.first_key(position) / kKeyBlock * kKeyBlock; key < last; key += kKeyBlock) {
    pack_keys(scratch, cache, key, int(std::min<int64_t>(kKeyBlock, last - key)), head_dim, slots);
    const uint64_t present = present_bits(slots);
    for (int r = 0; r < padded; r += 32) {
      float* s = scratch.s + r * kKeyBlock;
      bf16* p = scratch.p + r * kKeyBlock;
      multiply_keys_amx(s, scratch.q + r * head_dim, scratch.keys, head_dim);
      if (scoring.softcap != 0.0f) {
        for (int j = 0; j < 32 * kKeyBlock; j += 16) store(s + j, score(load(s + j), scoring));
      }
      for (int i = 0; i < std::min(32, rows - r); ++i) {
        const int64_t at = places[r + i];
        const uint64_t seen = present & span_bits(scoring.first_key(at) - key, at + 1 - key);
        const float shrink = softmax_block(p + i * kKeyBlock, s + i * kKeyBlock, seen, running[r + i]);
        if (shrink == 1.0f) continue;
        float* o = scratch.out + (r + i) * head_dim;
        for (int64_t d = 0; d < head_dim; d += 16) store(o + d, load(o + d) * shrink);
      }
      add_values_amx(scratch.out + r * head_dim, p, scratch.values, head_dim);
    }
  }
  for (int r = 0; r < rows; ++r) {
    bf16* place = out + r / group * out_stride + r % group * head_dim;
    const float scale = running[r].inverse_total();
    for (int64_t d = 0; d < head_dim; d += 16) store(place + d, load(scratch.out + r * head_dim + d) * scale);
  }
}

}  // namespace astrai

#endif
