// Which rows of a step decode, in runs.
#pragma once

#include <algorithm>
#include <vector>

#include "shape.h"

namespace astrai {

// A row decodes when it is the only one of its request in the step. This follows from its request alone, so that
// what is done to a row because of it does not depend on its company.
class RowRuns {
 public:
  struct Run {
    int64_t end;  // the first row after it
    bool decodes;
  };

  explicit RowRuns(const AstraiStep& step) {
    for (int64_t b = 0; b < step.batch; ++b) {
      const int64_t count = step.qo_indptr[b + 1] - step.qo_indptr[b];
      if (count > 0) add({step.qo_indptr[b + 1], count == 1});
    }
  }

  const Run& find(int64_t row) const {
    return *std::upper_bound(runs_.begin(), runs_.end(), row, [](int64_t at, const Run& run) { return at < run.end; });
  }
  bool any(bool decodes) const {
    return std::any_of(runs_.begin(), runs_.end(), [&](const Run& run) { return run.decodes == decodes; });
  }

 private:
  void add(const Run& run) {
    if (!runs_.empty() && runs_.back().decodes == run.decodes) {
      runs_.back().end = run.end;
    } else {
      runs_.push_back(run);
    }
  }

  std::vector<Run> runs_;
};

}  // namespace astrai
