// Whether a step can run: every index that the forward follows is looked at before anything is read or written.
#pragma once

#include <cinttypes>
#include <cstdio>

#include "shape.h"

namespace astrai {

// Where an error goes. false from any function below: it says what is wrong.
class Complaint {
 public:
  Complaint(char* text, int64_t size) : text_(text), size_(size) {}

  template <class... Args>
  bool say(const char* format, Args... args) const {
    std::snprintf(text_, size_t(size_), format, args...);
    return false;
  }

 private:
  char* text_;
  int64_t size_;
};

inline bool check_rows(const AstraiShape& shape, const AstraiStep& step, const Complaint& complaint) {
  for (int64_t t = 0; t < step.num_rows; ++t) {
    if (step.token_ids[t] < 0 || step.token_ids[t] >= shape.vocab) {
      return complaint.say("token_ids: wanted 0 to %" PRId64 ", got %" PRId64 " in row %" PRId64, shape.vocab - 1,
                           step.token_ids[t], t);
    }
    for (int64_t rope = 0; rope < shape.n_ropes; ++rope) {
      if (step.positions[t] < 0 || step.positions[t] >= step.num_positions[rope]) {
        return complaint.say("positions: wanted 0 to %" PRId64 ", got %" PRId64 " in row %" PRId64,
                             step.num_positions[rope] - 1, step.positions[t], t);
      }
    }
    if (step.out_cache_loc[t] >= step.num_slots) {
      return complaint.say("out_cache_loc: wanted below %" PRId64 " slots, got %d in row %" PRId64, step.num_slots,
                           step.out_cache_loc[t], t);
    }
  }
  for (int64_t r = 0; r < step.num_logits; ++r) {
    if (step.logits_rows[r] < 0 || step.logits_rows[r] >= step.num_rows) {
      return complaint.say("logits_rows: wanted 0 to %" PRId64 ", got %" PRId64, step.num_rows - 1,
                           step.logits_rows[r]);
    }
  }
  return true;
}

inline bool check_requests(const AstraiStep& step, const Complaint& complaint) {
  if (step.qo_indptr[0] != 0 || step.qo_indptr[step.batch] != step.num_rows) {
    return complaint.say("qo_indptr: wanted 0 to %" PRId64 " rows, got %d to %d", step.num_rows, step.qo_indptr[0],
                         step.qo_indptr[step.batch]);
  }
  for (int64_t b = 0; b < step.batch; ++b) {
    const int64_t rows = int64_t(step.qo_indptr[b + 1]) - step.qo_indptr[b], keys = step.seq_lens[b];
    if (rows < 0) return complaint.say("qo_indptr: wanted ascending, got less after request %" PRId64, b);
    if (keys < 0 || keys > step.max_ctx_len || (keys < rows && keys != 0)) {
      return complaint.say("seq_lens: wanted %" PRId64 " (the rows) to %" PRId64 ", or 0, got %" PRId64
                           " for request %" PRId64,
                           rows, step.max_ctx_len, keys, b);
    }
    const int64_t entry = step.req_pool_indices[b];
    if (entry < 0 || entry >= step.num_reqs) {
      return complaint.say("req_pool_indices: wanted 0 to %" PRId64 ", got %" PRId64, step.num_reqs - 1, entry);
    }
    const int32_t* slots = step.req_to_token + entry * step.table_stride;
    int32_t top = -1;
    for (int64_t i = 0; i < keys; ++i) top = slots[i] > top ? slots[i] : top;
    if (top >= step.num_slots) {
      return complaint.say("req_to_token: wanted below %" PRId64 " slots, got %d for request %" PRId64, step.num_slots,
                           top, b);
    }
  }
  return true;
}

inline bool check_step(const AstraiShape& shape, const AstraiStep& step, const Complaint& complaint) {
  return check_requests(step, complaint) && check_rows(shape, step, complaint);
}

}  // namespace astrai
