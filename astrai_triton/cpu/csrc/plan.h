// What attention has to do in a step, cut into pieces that threads can take; the same for all layers.
#pragma once

#include <vector>

#include "attend.h"

namespace astrai {

struct AttendPiece {
  int64_t row;         // first packed row
  int64_t count;       // rows; 1 with `split` >= 0
  int64_t position;    // of the first row, among the keys of its request
  int64_t split;       // which 128 keys of a decoding row; -1: all keys, several rows
  int64_t num_splits;  // of that row
  int64_t part;        // where the parts of the row begin, in splits
  const int32_t* slots;
};

struct AttendPlan {
  std::vector<AttendPiece> pieces;
  std::vector<int64_t> split_rows;  // indices of the first pieces of rows that have several splits
  int64_t num_parts = 0;

  // Rows of a request without keys, as padding of a batch has, get pieces that see nothing.
  AttendPlan(const AstraiStep& step, int64_t group, bool splits_rows) {
    const int64_t most = std::max<int64_t>(1, 96 / group);
    for (int64_t b = 0; b < step.batch; ++b) {
      const int64_t first = step.qo_indptr[b], count = step.qo_indptr[b + 1] - first;
      const int64_t keys = step.seq_lens[b];
      const int32_t* slots = step.req_to_token + step.req_pool_indices[b] * step.table_stride;
      if (count == 1 && splits_rows) {
        add_row(first, keys, slots);
        continue;
      }
      // The last blocks of rows see the most keys.
      for (int64_t start = 0; start < count; start += most) {
        const int64_t some = std::min(most, count - start);
        pieces.push_back({first + start, some, keys == 0 ? -some : keys - count + start, -1, 0, 0, slots});
      }
    }
  }

 private:
  void add_row(int64_t row, int64_t keys, const int32_t* slots) {
    const int64_t splits = std::max<int64_t>(1, (keys + kSplitKeys - 1) / kSplitKeys);
    if (splits > 1) split_rows.push_back(int64_t(pieces.size()));
    for (int64_t i = 0; i < splits; ++i) pieces.push_back({row, 1, keys - 1, i, splits, num_parts, slots});
    num_parts += splits;
  }
};

}  // namespace astrai
