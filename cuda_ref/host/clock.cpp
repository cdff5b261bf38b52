#include "host/clock.h"

#include <algorithm>

namespace astrai::host {

void BarrierClock::sync_warp(int warp, uint32_t mask) {
    ++now_;
    if (mask == UINT32_MAX) {
        warp_sync_[warp] = now_;
        return;
    }
    known_.resize(MAX_THREADS * LANES);
    uint32_t joined[LANES] = {};
    for (int lane = 0; lane < LANES; ++lane) {
        if (mask >> lane & 1u) {
            const uint32_t* row = &known_[(warp * LANES + lane) * LANES];
            std::transform(row, row + LANES, joined, joined,
                           [](uint32_t a, uint32_t b) { return std::max(a, b); });
        }
    }
    for (int lane = 0; lane < LANES; ++lane) {
        if (mask >> lane & 1u) {
            joined[lane] = now_;
        }
    }
    for (int lane = 0; lane < LANES; ++lane) {
        if (mask >> lane & 1u) {
            std::copy(joined, joined + LANES, &known_[(warp * LANES + lane) * LANES]);
        }
    }
}

}  // namespace astrai::host
