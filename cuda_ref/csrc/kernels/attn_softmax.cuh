// Softmax in base 2: exp2 and log2 are instructions, exp and log are not.
#pragma once

#include "csrc/kernels/attn_common.h"
#include "csrc/kernels/device.cuh"

namespace astrai {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// From q k to a score in base 2.
struct ScoreMap {
    float scale, softcap;

    ASTRAI_DEVICE explicit ScoreMap(const AttnParams& params)
        : scale(params.softcap > 0.0f ? params.score_scale / params.softcap : params.score_scale * LOG2_E),
          softcap(params.softcap * LOG2_E) {}

    ASTRAI_DEVICE float operator()(float product) const {
        return softcap > 0.0f ? softcap * tanhf(product * scale) : product * scale;
    }
};

// What to subtract from scores before exp2: where nothing was seen every score is -inf, and so must stay.
ASTRAI_DEVICE float softmax_base(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// What to multiply by to normalise; where nothing was seen there are zeros to normalise. NaN stays NaN.
ASTRAI_DEVICE float inverse_sum(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

// Sink of a head as a score in base 2; -inf is none.
ASTRAI_DEVICE float sink_score(const AttnParams& params, int q_head) {
    return params.sinks == nullptr ? -INFINITY : load_global(params.sinks + q_head) * LOG2_E;
}

ASTRAI_DEVICE float natural_lse(float maximum, float sum) { return (maximum + log2f(sum)) * LN_2; }

}  // namespace astrai
