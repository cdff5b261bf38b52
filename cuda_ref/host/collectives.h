// Barriers, shuffles, votes and matrix operations: what lanes of a warp, or threads of a block, do together.
#pragma once

#include <cstdint>
#include <cstring>

#include "host/block.h"
#include "host/site.h"
#include "host/types.h"

namespace astrai::host {

// In: the value and the number that tells the lane to read from. Out: the value of that lane.
struct Shuffle {
    uint64_t value;
    unsigned lane;
};

// Of the PTX instruction shfl: lanes are cut into segments of a width, a power of two.
void shuffle(Collective mode, uint32_t mask, Shuffle& shuffle, int width, Site site);

// Bits of the lanes of mask where the predicate holds.
uint32_t vote(Collective mode, uint32_t mask, bool predicate, Site site);

// row: what the calling lane gives, 16 bytes. r: what it gets.
void load_matrices(Collective mode, const unsigned char* row, uint32_t (&r)[4], Site site);

// Of mma_m16n8k16, as the calling lane gives them.
struct MmaOperands {
    float (&d)[4];
    const uint32_t (&a)[4];
    const uint32_t (&b)[2];
};
// For bf16 and f16.
template <class T>
void multiply_matrices(MmaOperands operands, Site site);

template <class T>
T shuffle_value(Collective mode, uint32_t mask, T value, unsigned lane, int width, Site site) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
    Shuffle moved = {0, lane};
    std::memcpy(&moved.value, &value, sizeof(T));
    shuffle(mode, mask, moved, width, site);
    std::memcpy(&value, &moved.value, sizeof(T));
    return value;
}

}  // namespace astrai::host

inline void __syncthreads(astrai::host::Site site = astrai::host::Site::here()) {
    astrai::host::current_block->sync_threads(site);
}

void __syncwarp(unsigned mask = UINT32_MAX, astrai::host::Site site = astrai::host::Site::here());

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = astrai::host::LANES,
              astrai::host::Site site = astrai::host::Site::here()) {
    using namespace astrai::host;
    return shuffle_value(Collective::shfl, mask, value, static_cast<unsigned>(lane), width, site);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = astrai::host::LANES,
                 astrai::host::Site site = astrai::host::Site::here()) {
    return astrai::host::shuffle_value(astrai::host::Collective::shfl_up, mask, value, delta, width, site);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = astrai::host::LANES,
                   astrai::host::Site site = astrai::host::Site::here()) {
    return astrai::host::shuffle_value(astrai::host::Collective::shfl_down, mask, value, delta, width, site);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = astrai::host::LANES,
                  astrai::host::Site site = astrai::host::Site::here()) {
    using namespace astrai::host;
    return shuffle_value(Collective::shfl_xor, mask, value, static_cast<unsigned>(lane_mask), width, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              astrai::host::Site site = astrai::host::Site::here()) {
    return astrai::host::vote(astrai::host::Collective::ballot, mask, predicate != 0, site);
}

inline int __any_sync(unsigned mask, int predicate, astrai::host::Site site = astrai::host::Site::here()) {
    return astrai::host::vote(astrai::host::Collective::any, mask, predicate != 0, site) != 0;
}

inline int __all_sync(unsigned mask, int predicate, astrai::host::Site site = astrai::host::Site::here()) {
    return astrai::host::vote(astrai::host::Collective::all, mask, predicate != 0, site) == mask;
}
