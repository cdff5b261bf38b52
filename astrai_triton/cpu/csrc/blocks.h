// How a team shares out the rows of a phase, and the blocks of a matrix.
#pragma once

#include <algorithm>

#include "layout.h"
#include "team.h"

namespace astrai {

// Many rows go by eight, so that taking them costs nothing beside them.
template <class Fn>
inline void for_rows(Worker& worker, int64_t count, Fn&& fn) {
  const int64_t some = count < 64 ? 1 : 8;
  worker.for_each((count + some - 1) / some, [&](int64_t item) {
    for (int64_t i = item * some; i < std::min(count, (item + 1) * some); ++i) fn(i);
  });
}

// fn(first row, last row, block) for all of them, once. `least` rows go together even where the cache is too small.
template <class Fn>
inline void for_blocks(Worker& worker, const Matrix& matrix, int64_t rows, int64_t row_bytes, int64_t least,
                       Fn&& fn) {
  constexpr int64_t kCacheBytes = 1280 << 10;
  const int64_t blocks = matrix.num_blocks();
  int64_t some = std::max(least, kCacheBytes / row_bytes / kTileRows * kTileRows);
  const auto count_parts = [&] { return (rows + some - 1) / some; };
  while (some > 2 * kTileRows && count_parts() * blocks < 8 * worker.num_threads()) {
    some = round_up(some / 2, kTileRows);
  }
  worker.for_each(count_parts() * blocks, [&](int64_t item) {
    const int64_t first = item / blocks * some;
    fn(first, std::min(rows, first + some), item % blocks);
  });
}

}  // namespace astrai
