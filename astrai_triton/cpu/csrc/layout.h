// How matrices lie in memory: weights in blocks of 32 columns, activations in rows.
//
// A block is everything that 32 outputs need, contiguous along K, so that whoever computes them reads one stream.
// It is a sequence of steps along K; a step holds two halves of 16 columns, each the B operand of a matrix unit:
//
//   float32  32 values of K, [32 k][32 columns]                           4 KiB
//   bfloat16 32 values of K, [2 halves][16 pairs of k][16 columns][2]     2 KiB, a half is one AMX tile
//   int8     64 values of K, [2 halves][16 quads of k][16 columns][4]     2 KiB, then [32] bfloat16 scales
//   int4     64 values of K, the same quads in half the bytes             1 KiB, then [2 groups][2][32] float16
//
// One line of 64 bytes is then 16 columns of one pair (quad) of k, which is what VDPBF16PS and VPDPBUSD take.
// Columns and K are padded with zeros; rows of activations are padded with zeros alike.
#pragma once

#include "shape.h"
#include "simd.h"

namespace astrai {

constexpr int kBlock = 32;        // columns of a block
constexpr int kHalf = 16;         // columns of half a block
constexpr int kTileRows = 32;     // rows of activations that a kernel takes at once
constexpr int kGroup = 64;        // values of K in a step of quantised weights; those of int8 share a scale
constexpr int kFineGroup = 32;    // values of K that share a scale and a minimum in int4
constexpr int64_t kQuantStep8 = kGroup * kBlock + kBlock * 2;
constexpr int64_t kQuantStep4 = kGroup * kBlock / 2 + kGroup / kFineGroup * kBlock * 4;

// A packed matrix.
struct Matrix {
  const uint8_t* data = nullptr;
  const float* bias = nullptr;  // [columns padded], null without
  int64_t columns = 0;          // outputs, before padding
  int64_t depth = 0;            // K after padding
  int64_t block_bytes = 0;

  int64_t num_blocks() const { return round_up(columns, kBlock) / kBlock; }
  const uint8_t* block(int64_t i) const { return data + i * block_bytes; }
};

// Elements between rows of activations: whole lines, an odd number of them. With an even number of lines the 16
// rows of a tile would fall into few of the 64 sets of the first cache.
inline int64_t row_stride(int64_t depth, int64_t item) {
  const int64_t lines = round_up(depth * item, 64) / 64;
  return (lines | 1) * 64 / item;
}

inline int64_t padded_depth(int64_t depth, int32_t weights) {
  return round_up(depth, weights >= kWeightsInt8 ? kGroup : 32);
}
// The LM head chooses tokens, and would lose most of all matrices by four bits.
inline int32_t head_weights(int32_t weights) { return weights == kWeightsInt4 ? kWeightsInt8 : weights; }

inline int64_t block_bytes(int64_t depth, int32_t weights) {
  switch (weights) {
    case kWeightsF32: return depth * kBlock * 4;
    case kWeightsBf16: return depth * kBlock * 2;
    case kWeightsInt8: return depth / kGroup * kQuantStep8;
    default: return depth / kGroup * kQuantStep4;
  }
}

}  // namespace astrai
