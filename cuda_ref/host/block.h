// One block: its threads as fibres, what they wait for, and who runs next.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "host/async_copy.h"
#include "host/clock.h"
#include "host/errors.h"
#include "host/fibre.h"
#include "host/global_memory.h"
#include "host/shared_memory.h"
#include "host/site.h"

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Of the running thread. __thread: no access goes through a function that might have to initialise them.
extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace astrai::host {

class Block;

// The block that the calling CPU thread runs; null outside of launches.
extern __thread Block* current_block;

enum class Collective : uint8_t {
    none,
    syncthreads,
    syncwarp,
    shfl,
    shfl_up,
    shfl_down,
    shfl_xor,
    ballot,
    any,
    all,
    ldmatrix,
    ldmatrix_trans,
    mma,
};

const char* name_of(Collective collective);

// What a launch runs, the same for all of its blocks.
struct Launch {
    const char* name;
    void (*run_thread)(const void* kernel, const void* params);
    const void* kernel;
    const void* params;
    uint3 grid;
    int num_threads;
    int shared_bytes;
    const std::vector<MemoryRange>* ranges;
};

// What the lanes of a warp hand to a collective: each its own arguments and results.
using Payloads = void* [LANES];
using Execute = void (*)(Block& block, int warp, uint32_t mask, Payloads& payloads);

struct Thread {
    Fibre fibre;
    AsyncCopies copies;
    uint16_t number = 0;
    Collective waits_in = Collective::none;
    Site site = {};
    bool has_ended = false;
};

class Block {
public:
    void prepare(const Launch& launch);
    // Runs block idx on the calling CPU thread. Raises what a thread of it raised; then the object is of no
    // more use.
    void run(uint3 idx);

    // For the running thread:
    unsigned thread_number() const { return running_->number; }
    AsyncCopies& copies() { return running_->copies; }
    SharedMemory& shared() { return shared_; }
    GlobalMemory& global() { return global_; }
    const char* kernel_name() const { return launch_->name; }

    // __syncthreads
    void sync_threads(Site site);
    // Waits for the lanes of mask to call the same collective at the same place; the last one executes it.
    void gather(Collective collective, uint32_t mask, Site site, void* payload, Execute execute);

private:
    // Lanes that have come to a collective and wait for others.
    struct Gathering {
        Collective collective;
        uint32_t mask, arrived;
        Site site;
    };
    struct Warp {
        uint32_t runnable = 0;  // lanes that wait for nothing, but for their turn
        uint32_t gone = 0;      // lanes that have ended or never were
        int num_gatherings = 0;
        Gathering gatherings[LANES];
        Payloads payloads;
    };

    static void enter_thread();
    void start_threads();
    // The fibre to go on with.
    Fibre& end_thread();
    // A thread that may run, preferably of the warp of the running one, whose stacks are in the cache.
    Thread& take_next();
    void wait(Collective collective, Site site);
    Gathering* find_gathering(Warp& warp, Collective collective, uint32_t mask, Site site);
    Gathering* start_gathering(Warp& warp, const Gathering& wanted, int lane);
    void release(int warp, uint32_t lanes);

    [[noreturn]] void fail_barrier(Site site) const;
    [[noreturn]] void fail_exit(Site site, Collective collective) const;
    [[noreturn]] void fail_deadlock() const;

    const Launch* launch_ = nullptr;
    std::vector<Thread> threads_;
    Stacks stacks_;
    SharedMemory shared_;
    GlobalMemory global_;

    Fibre caller_;
    Thread* running_ = nullptr;
    Warp warps_[MAX_WARPS];
    uint32_t runnable_warps_ = 0;  // those with runnable lanes
    int num_waiting_ = 0;  // in __syncthreads
    int num_ended_ = 0;
    Site barrier_site_ = {};
    std::exception_ptr error_;
};

}  // namespace astrai::host
