#include "host/collectives.h"

#include <string>

namespace astrai::host {

const char* name_of(Collective collective) {
    switch (collective) {
        case Collective::none: return "none";
        case Collective::syncthreads: return "__syncthreads";
        case Collective::syncwarp: return "__syncwarp";
        case Collective::shfl: return "__shfl_sync";
        case Collective::shfl_up: return "__shfl_up_sync";
        case Collective::shfl_down: return "__shfl_down_sync";
        case Collective::shfl_xor: return "__shfl_xor_sync";
        case Collective::ballot: return "__ballot_sync";
        case Collective::any: return "__any_sync";
        case Collective::all: return "__all_sync";
        case Collective::ldmatrix: return "ldmatrix_x4";
        case Collective::ldmatrix_trans: return "ldmatrix_x4_trans";
        case Collective::mma: return "mma_m16n8k16";
    }
    return "unknown collective";
}

namespace {

template <class Run>
void for_each_lane(uint32_t mask, Run run) {
    for (; mask != 0; mask &= mask - 1) {
        run(__builtin_ctz(mask));
    }
}

void execute_sync(Block& block, int warp, uint32_t mask, Payloads&) {
    block.shared().clock().sync_warp(warp, mask);
}

struct Move {
    Shuffle* shuffle;
    int width;
    uint64_t result;
};

// The lane that a lane reads from, by the definition of shfl in the PTX manual.
int source_lane(Collective mode, int lane, int operand, int width) {
    const int begin = lane & ~(width - 1), last = begin + width - 1;
    switch (mode) {
        case Collective::shfl: return begin | (operand & (width - 1));
        case Collective::shfl_up: return lane - operand >= begin ? lane - operand : lane;
        case Collective::shfl_down: return lane + operand <= last ? lane + operand : lane;
        // May lead into a segment before, not into one behind.
        default: return (lane ^ operand) <= last ? lane ^ operand : lane;
    }
}

// The modes differ in their sources alone, which each lane has found for itself.
void execute_shuffle(Block&, int, uint32_t mask, Payloads& payloads) {
    for_each_lane(mask, [&](int lane) {
        Move& move = *static_cast<Move*>(payloads[lane]);
        move.result = static_cast<Move*>(payloads[move.shuffle->lane])->shuffle->value;
    });
}

struct Vote {
    bool predicate;
    uint32_t result;
};

void execute_vote(Block&, int, uint32_t mask, Payloads& payloads) {
    uint32_t ballot = 0;
    for_each_lane(mask, [&](int lane) {
        ballot |= (static_cast<Vote*>(payloads[lane])->predicate ? 1u : 0u) << lane;
    });
    for_each_lane(mask, [&](int lane) { static_cast<Vote*>(payloads[lane])->result = ballot; });
}

struct MatrixRow {
    const unsigned char* row;
    uint32_t* r;
};

uint16_t load_element(const Payloads& payloads, int matrix, int row, int col) {
    uint16_t element;
    const unsigned char* bytes = static_cast<const MatrixRow*>(payloads[8 * matrix + row])->row;
    std::memcpy(&element, bytes + 2 * col, sizeof(element));
    return element;
}

template <bool IS_TRANSPOSED>
void execute_ldmatrix(Block&, int, uint32_t, Payloads& payloads) {
    for (int lane = 0; lane < LANES; ++lane) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            const int major = lane / 4, minor = lane % 4 * 2;
            const uint32_t low = IS_TRANSPOSED ? load_element(payloads, matrix, minor, major)
                                               : load_element(payloads, matrix, major, minor);
            const uint32_t high = IS_TRANSPOSED ? load_element(payloads, matrix, minor + 1, major)
                                                : load_element(payloads, matrix, major, minor + 1);
            static_cast<MatrixRow*>(payloads[lane])->r[matrix] = low | high << 16;
        }
    }
}

constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
// A vector register: half a row of b or d.
typedef float Quad __attribute__((vector_size(16)));

struct alignas(16) MmaRow {
    float element[MMA_N];

    Quad load(int half) const {
        Quad quad;
        std::memcpy(&quad, element + 4 * half, sizeof(quad));
        return quad;
    }
    void store(int half, Quad quad) { std::memcpy(element + 4 * half, &quad, sizeof(quad)); }
};

// Rows and columns of fragments: lane = 4 group + member. Element i of a lane lies in half i % 2 of
// register i / 2.
template <class T>
void gather_operands(const Payloads& payloads, float (&a)[MMA_M][MMA_K], MmaRow (&b)[MMA_K]) {
    for (int lane = 0; lane < LANES; ++lane) {
        const MmaOperands& operands = *static_cast<const MmaOperands*>(payloads[lane]);
        const int group = lane / 4, member = lane % 4;
        for (int i = 0; i < 8; ++i) {
            const uint16_t bits = static_cast<uint16_t>(operands.a[i / 2] >> i % 2 * 16);
            a[group + i / 2 % 2 * 8][member * 2 + i % 2 + i / 4 * 8] = to_float(T{bits});
        }
        for (int i = 0; i < 4; ++i) {
            const uint16_t bits = static_cast<uint16_t>(operands.b[i / 2] >> i % 2 * 16);
            b[member * 2 + i % 2 + i / 2 * 8].element[group] = to_float(T{bits});
        }
    }
}

// Products of 16-bit numbers are exact in float32; sums are rounded in ascending k, from d on.
template <class T>
void execute_mma(Block&, int, uint32_t, Payloads& payloads) {
    float a[MMA_M][MMA_K];
    MmaRow b[MMA_K], d[MMA_M];
    gather_operands<T>(payloads, a, b);
    for (int lane = 0; lane < LANES; ++lane) {
        const float* fragment = static_cast<const MmaOperands*>(payloads[lane])->d;
        for (int i = 0; i < 4; ++i) {
            d[lane / 4 + i / 2 * 8].element[lane % 4 * 2 + i % 2] = fragment[i];
        }
    }
    for (int m = 0; m < MMA_M; ++m) {
        Quad low = d[m].load(0), high = d[m].load(1);
        for (int k = 0; k < MMA_K; ++k) {
            low += a[m][k] * b[k].load(0);
            high += a[m][k] * b[k].load(1);
        }
        d[m].store(0, low);
        d[m].store(1, high);
    }
    for (int lane = 0; lane < LANES; ++lane) {
        float* fragment = static_cast<const MmaOperands*>(payloads[lane])->d;
        for (int i = 0; i < 4; ++i) {
            fragment[i] = d[lane / 4 + i / 2 * 8].element[lane % 4 * 2 + i % 2];
        }
    }
}

}  // namespace

void shuffle(Collective mode, uint32_t mask, Shuffle& shuffle, int width, Site site) {
    if (width < 1 || width > LANES || (width & (width - 1)) != 0) {
        fail(Fault::invalid_collective, site,
             std::string(name_of(mode)) +
                 " of a width that is no power of two up to 32: " + std::to_string(width));
    }
    Block& block = *current_block;
    const int lane = static_cast<int>(block.thread_number()) % LANES;
    // The instruction takes the lowest five bits of its operand.
    shuffle.lane = source_lane(mode, lane, static_cast<int>(shuffle.lane % LANES), width);
    // Who is not in the mask itself is told so below.
    if ((mask >> shuffle.lane & 1u) == 0 && (mask >> lane & 1u) != 0) {
        fail(Fault::invalid_collective, site,
             std::string(name_of(mode)) + " reads lane " + std::to_string(shuffle.lane) +
                 ", which its mask leaves out");
    }
    Move move = {&shuffle, width, 0};
    block.gather(mode, mask, site, &move, execute_shuffle);
    shuffle.value = move.result;
}

uint32_t vote(Collective mode, uint32_t mask, bool predicate, Site site) {
    Vote vote = {predicate, 0};
    current_block->gather(mode, mask, site, &vote, execute_vote);
    return vote.result;
}

void load_matrices(Collective mode, const unsigned char* row, uint32_t (&r)[4], Site site) {
    MatrixRow payload = {row, r};
    const Execute execute =
        mode == Collective::ldmatrix_trans ? execute_ldmatrix<true> : execute_ldmatrix<false>;
    current_block->gather(mode, UINT32_MAX, site, &payload, execute);
}

template <class T>
void multiply_matrices(MmaOperands operands, Site site) {
    current_block->gather(Collective::mma, UINT32_MAX, site, &operands, execute_mma<T>);
}
template void multiply_matrices<bf16>(MmaOperands, Site);
template void multiply_matrices<f16>(MmaOperands, Site);

}  // namespace astrai::host

void __syncwarp(unsigned mask, astrai::host::Site site) {
    using namespace astrai::host;
    current_block->gather(Collective::syncwarp, mask, site, nullptr, execute_sync);
}
