// What both prefill variants know about rows of q: the keys they see, and how their softmax starts and ends.
#pragma once

#include "csrc/kernels/attn_common.h"
#include "csrc/kernels/attn_softmax.cuh"
#include "csrc/kernels/device.cuh"

namespace astrai {
namespace prefill {

// Keys begin ... end - 1; none unless begin < end.
struct KeyRange {
    int begin, end;

    ASTRAI_DEVICE bool has(int key) const { return begin <= key && key < end; }
    ASTRAI_DEVICE bool meets(int first, int count) const {
        return begin < end && begin < first + count && first < end;
    }
    ASTRAI_DEVICE bool covers(int first, int count) const { return begin <= first && first + count <= end; }
};

// Keys in the window of a row. Row 0 stands at position kv_len - q_len, which may be negative.
ASTRAI_DEVICE KeyRange window_of_row(const AttnParams& params, int q_len, int kv_len, int row) {
    const int position = kv_len - q_len + row;
    const int begin = position - params.window_left;
    const int last = position + params.window_right;
    return {begin > 0 ? begin : 0, last < kv_len ? last + 1 : kv_len};
}

// Neighbouring rows of one request, of which there is at least one. Windows move by one key a row, so their
// union has no gap.
struct RowSpan {
    int first, last;
    KeyRange seen_by_some, seen_by_all;

    ASTRAI_DEVICE RowSpan(const AttnParams& params, int q_len, int kv_len, int first_row, int num_rows)
        : first(first_row), last(first_row + num_rows <= q_len ? first_row + num_rows - 1 : q_len - 1) {
        const KeyRange of_first = window_of_row(params, q_len, kv_len, first);
        const KeyRange of_last = window_of_row(params, q_len, kv_len, last);
        seen_by_some = {of_first.begin, of_last.end};
        seen_by_all = {of_last.begin, of_first.end};
    }
};

// Whether rows of a tile exist; a work map may name a tile beyond the end of its request.
template <class Q>
ASTRAI_DEVICE bool has_rows(const Q& schedule) {
    return schedule.q_len > 0 && schedule.tile <= (schedule.q_len - 1) / Q_TILE;
}

// Turns products of q and k into scores in base 2. One branch for all: one a score costs registers.
template <int COUNT>
ASTRAI_DEVICE void scale_scores(const AttnParams& params, float* scores) {
    if (params.softcap > 0.0f) {
        const float scale = params.score_scale / params.softcap, softcap = params.softcap * LOG2_E;
        ASTRAI_UNROLL
        for (int i = 0; i < COUNT; ++i) {
            scores[i] = softcap * tanhf(scores[i] * scale);
        }
    } else {
        const float scale = params.score_scale * LOG2_E;
        ASTRAI_UNROLL
        for (int i = 0; i < COUNT; ++i) {
            scores[i] *= scale;
        }
    }
}

// Softmax over the keys so far: the maximum of their scores in base 2, and the sum of exp2(score - maximum).
struct SoftmaxState {
    float maximum, sum;
};

// Before the first key: the sink of a head alone, which counts as a key without a value.
ASTRAI_DEVICE SoftmaxState start_softmax(const AttnParams& params, int q_head) {
    const float sink = sink_score(params, q_head);
    return {sink, sink == -INFINITY ? 0.0f : 1.0f};
}

}  // namespace prefill
}  // namespace astrai
