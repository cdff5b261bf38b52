// From matrices as checkpoints hold them, [out, in] row-major, to the blocks of layout.h.
#pragma once

#include <algorithm>

#include "layout.h"
#include "quant.h"

namespace astrai {

// Which row of the source a packed column comes from; -1 is padding.
struct ColumnMap {
  int64_t rows;       // of the source
  int64_t inner = 0;  // > 0: the source is gate over up, and halves of blocks take turns between them

  int64_t columns() const { return inner ? 2 * round_up(inner, kHalf) : rows; }
  int64_t source(int64_t column) const {
    if (!inner) return column < rows ? column : -1;
    // A block holds 16 gates and the 16 ups that belong to them, so that one thread has both.
    const int64_t i = column / kBlock * kHalf + column % kHalf;
    if (i >= inner) return -1;
    return column % kBlock < kHalf ? i : inner + i;
  }
};

// One value of a matrix of dtype F32 or BF16.
inline float read_value(const void* source, int32_t dtype, int64_t i) {
  return dtype == kF32 ? static_cast<const float*>(source)[i] : widen(static_cast<const bf16*>(source)[i]);
}

inline void pack_block(uint8_t* block, const void* source, int32_t dtype, int64_t depth, int64_t padded,
                       int32_t weights, const ColumnMap& map, int64_t first) {
  float values[kGroup];
  for (int c = 0; c < kBlock; ++c) {
    const int64_t row = map.source(first + c);
    if (row < 0) continue;  // The arena is zero.
    for (int64_t start = 0; start < padded; start += kGroup) {
      const int64_t count = std::min<int64_t>(kGroup, depth - start);
      for (int64_t i = 0; i < kGroup; ++i) {
        values[i] = i < count ? read_value(source, dtype, row * depth + start + i) : 0.0f;
      }
      const int64_t stop = std::min<int64_t>(kGroup, padded - start);
      if (weights == kWeightsF32) {
        float* out = reinterpret_cast<float*>(block);
        for (int64_t i = 0; i < stop; ++i) out[(start + i) * kBlock + c] = values[i];
      } else if (weights == kWeightsBf16) {
        bf16* out = reinterpret_cast<bf16*>(block) + c / kHalf * 512 + c % kHalf * 2;
        for (int64_t i = 0; i < stop; ++i) {
          const int64_t k = start + i;
          out[k / 32 * 1024 + k % 32 / 2 * 32 + k % 2] = narrow(values[i]);
        }
      } else if (weights == kWeightsInt8) {
        pack_int8(block + start / kGroup * kQuantStep8, values, c);
      } else {
        pack_int4(block + start / kGroup * kQuantStep4, values, c);
      }
    }
  }
}

// Fills `data`, which is zero and has room for all blocks.
inline Matrix pack(uint8_t* data, const void* source, int32_t dtype, int64_t depth, int32_t weights,
                   const ColumnMap& map, int threads) {
  Matrix matrix;
  matrix.data = data;
  matrix.columns = map.columns();
  matrix.depth = padded_depth(depth, weights);
  matrix.block_bytes = block_bytes(matrix.depth, weights);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 8)
  for (int64_t b = 0; b < matrix.num_blocks(); ++b) {
    pack_block(data + b * matrix.block_bytes, source, dtype, depth, matrix.depth, weights, map, b * kBlock);
  }
  return matrix;
}

// The row of `source` that became column `column`, back again; float32 and bfloat16 only. out[depth].
inline void unpack_column(float* out, const Matrix& matrix, int32_t weights, int64_t column, int64_t depth) {
  const uint8_t* block = matrix.block(column / kBlock);
  const int64_t c = column % kBlock;
  if (weights == kWeightsF32) {
    const float* in = reinterpret_cast<const float*>(block) + c;
    for (int64_t k = 0; k < depth; ++k) out[k] = in[k * kBlock];
    return;
  }
  const bf16* in = reinterpret_cast<const bf16*>(block) + c / kHalf * 512 + c % kHalf * 2;
  for (int64_t k = 0; k < depth; ++k) out[k] = widen(in[k / 32 * 1024 + k % 32 / 2 * 32 + k % 2]);
}

}  // namespace astrai
