// Which accesses of the threads of a block a barrier has put before the present.
#pragma once

#include <cstdint>
#include <vector>

namespace astrai::host {

constexpr int LANES = 32, MAX_WARPS = 32, MAX_THREADS = LANES * MAX_WARPS;

// An access by a thread to a place in shared memory.
struct Access {
    uint32_t time;
    uint16_t thread;
    uint16_t site;
};

inline bool is_same_warp(unsigned a, unsigned b) { return a / LANES == b / LANES; }

// Time is the number of barriers that were completed. It goes on from block to block, so that what is
// remembered of earlier blocks needs no clearing.
class BarrierClock {
public:
    uint32_t now() const { return now_; }
    uint32_t block_start() const { return block_start_; }
    uint32_t block_sync() const { return block_sync_; }

    void start_block() { block_start_ = block_sync_ = ++now_; }
    void sync_block() { block_sync_ = ++now_; }
    void sync_warp(int warp, uint32_t mask);
    void reset() { *this = BarrierClock(); }

    // A barrier lies between the access and what the thread does now, or both are of the same thread.
    bool is_before(Access access, unsigned thread) const {
        return access.time < block_sync_ || access.thread == thread ||
               (is_same_warp(access.thread, thread) && is_before_in_warp(access, thread));
    }

private:
    bool is_before_in_warp(Access access, unsigned thread) const {
        return access.time < warp_sync_[thread / LANES] ||
               (!known_.empty() && access.time < known_[thread * LANES + access.thread % LANES]);
    }

    uint32_t now_ = 0, block_start_ = 0, block_sync_ = 0;
    uint32_t warp_sync_[MAX_WARPS] = {};
    // Vector clocks, there from the first barrier of a part of a warp on: [thread, lane] is the time before
    // which the accesses of a lane are known to the thread.
    std::vector<uint32_t> known_;
};

}  // namespace astrai::host
