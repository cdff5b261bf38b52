#include "host/block.h"

#include <algorithm>

#include "host/waits.h"

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace astrai::host {

__thread Block* current_block = nullptr;

namespace {

int warp_of(const Thread& thread) { return thread.number / LANES; }
uint32_t bit_of(const Thread& thread) { return 1u << thread.number % LANES; }

// Of the lanes of a warp, those that a block of num_threads has.
uint32_t lanes_of_warp(int warp, int num_threads) {
    const int num_lanes = std::clamp(num_threads - warp * LANES, 0, LANES);
    return num_lanes == LANES ? UINT32_MAX : (1u << num_lanes) - 1;
}

}  // namespace

void Block::prepare(const Launch& launch) {
    launch_ = &launch;
    const size_t num_threads = static_cast<size_t>(launch.num_threads);
    threads_.resize(std::max(threads_.size(), num_threads));
    stacks_.reserve(launch.num_threads);
    shared_.reserve(launch.shared_bytes);
    global_.allow(launch.ranges);
}

void Block::run(uint3 idx) {
    shared_.start_block();
    start_threads();
    current_block = this;
    blockIdx = idx;
    blockDim = {static_cast<unsigned>(launch_->num_threads), 1, 1};
    gridDim = launch_->grid;
    running_ = nullptr;
    Thread& first = take_next();
    running_ = &first;
    threadIdx = {first.number, 0, 0};
    Fibre::switch_to(caller_, first.fibre);
    current_block = nullptr;
    if (error_) {
        std::rethrow_exception(error_);
    }
}

void Block::start_threads() {
    num_waiting_ = num_ended_ = 0;
    runnable_warps_ = 0;
    for (int i = 0; i < launch_->num_threads; ++i) {
        Thread& thread = threads_[i];
        thread.number = static_cast<uint16_t>(i);
        thread.waits_in = Collective::none;
        thread.has_ended = false;
        thread.copies.clear();
        thread.fibre.start(stacks_.top(i), Stacks::usable_bytes(), &Block::enter_thread);
    }
    for (int warp = 0; warp < MAX_WARPS; ++warp) {
        const uint32_t lanes = lanes_of_warp(warp, launch_->num_threads);
        warps_[warp].num_gatherings = 0;
        warps_[warp].runnable = 0;
        warps_[warp].gone = ~lanes;
        release(warp, lanes);
    }
}

void Block::enter_thread() {
    Block& block = *current_block;
    Thread& thread = *block.running_;
    Fibre* next = &block.caller_;
    try {
        block.launch_->run_thread(block.launch_->kernel, block.launch_->params);
        next = &block.end_thread();
    } catch (...) {
        block.error_ = std::current_exception();
    }
    // Outside of the handler: the exception of a handler that is never left would stay on this CPU thread.
    Fibre::switch_to(thread.fibre, *next);
    __builtin_unreachable();
}

Fibre& Block::end_thread() {
    Thread& thread = *running_;
    thread.copies.check_finished();
    if (num_waiting_ > 0) {
        fail_exit(barrier_site_, Collective::syncthreads);
    }
    Warp& warp = warps_[warp_of(thread)];
    for (int i = 0; i < warp.num_gatherings; ++i) {
        const Gathering& gathering = warp.gatherings[i];
        if ((gathering.mask & bit_of(thread)) != 0) {
            fail_exit(gathering.site, gathering.collective);
        }
    }
    warp.gone |= bit_of(thread);
    thread.has_ended = true;
    thread.site = {"end of the kernel", 0};
    if (++num_ended_ == launch_->num_threads) {
        return caller_;
    }
    running_ = &take_next();
    threadIdx.x = running_->number;
    return running_->fibre;
}

Thread& Block::take_next() {
    if (runnable_warps_ == 0) {
        fail_deadlock();
    }
    int warp = running_ == nullptr ? 0 : warp_of(*running_);
    if (warps_[warp].runnable == 0) {
        warp = __builtin_ctz(runnable_warps_);
    }
    uint32_t& runnable = warps_[warp].runnable;
    const int lane = __builtin_ctz(runnable);
    runnable &= runnable - 1;
    if (runnable == 0) {
        runnable_warps_ &= ~(1u << warp);
    }
    return threads_[warp * LANES + lane];
}

void Block::release(int warp, uint32_t lanes) {
    warps_[warp].runnable |= lanes;
    runnable_warps_ |= (warps_[warp].runnable != 0 ? 1u : 0u) << warp;
}

void Block::wait(Collective collective, Site site) {
    Thread& thread = *running_;
    thread.waits_in = collective;
    thread.site = site;
    running_ = &take_next();
    threadIdx.x = running_->number;
    Fibre::switch_to(thread.fibre, running_->fibre);
    thread.waits_in = Collective::none;
}

void Block::sync_threads(Site site) {
    if (num_ended_ > 0 || (num_waiting_ > 0 && site != barrier_site_)) {
        fail_barrier(site);
    }
    barrier_site_ = site;
    if (++num_waiting_ < launch_->num_threads) {
        wait(Collective::syncthreads, site);
        return;
    }
    num_waiting_ = 0;
    shared_.clock().sync_block();
    for (int warp = 0; warp * LANES < launch_->num_threads; ++warp) {
        const uint32_t lanes = lanes_of_warp(warp, launch_->num_threads);
        release(warp, warp == warp_of(*running_) ? lanes & ~bit_of(*running_) : lanes);
    }
}

inline Block::Gathering* Block::find_gathering(Warp& warp, Collective collective, uint32_t mask, Site site) {
    for (int i = 0; i < warp.num_gatherings; ++i) {
        Gathering& other = warp.gatherings[i];
        if (other.mask == mask && other.collective == collective && other.site == site) {
            return &other;
        }
    }
    return nullptr;
}

Block::Gathering* Block::start_gathering(Warp& warp, const Gathering& wanted, int lane) {
    if ((wanted.mask >> lane & 1u) == 0) {
        fail(Fault::invalid_collective, wanted.site,
             std::string(name_of(wanted.collective)) + " with a mask that leaves out the calling lane");
    }
    if ((wanted.mask & warp.gone) != 0) {
        fail(Fault::divergence, wanted.site,
             std::string("comes to ") + name_of(wanted.collective) + " with " +
                 describe_lanes(wanted.mask & warp.gone) + ", which have ended or are not in the block");
    }
    for (int i = 0; i < warp.num_gatherings; ++i) {
        const Gathering& other = warp.gatherings[i];
        // Lanes that this one must wait for wait for it elsewhere.
        if ((other.mask >> lane & 1u) != 0 && (other.arrived & wanted.mask) != 0) {
            fail(Fault::divergence, wanted.site,
                 std::string("comes to ") + name_of(wanted.collective) + " while " +
                     describe_lanes(other.arrived) + " of its warp wait for it in " +
                     name_of(other.collective) + " at " + describe(other.site));
        }
    }
    // Each holds a waiting lane, so there are fewer than lanes.
    Gathering& gathering = warp.gatherings[warp.num_gatherings++];
    gathering = wanted;
    return &gathering;
}

void Block::gather(Collective collective, uint32_t mask, Site site, void* payload, Execute execute) {
    const int warp_idx = warp_of(*running_), lane = running_->number % LANES;
    const uint32_t bit = 1u << lane;
    Warp& warp = warps_[warp_idx];
    Gathering* gathering = find_gathering(warp, collective, mask, site);
    // Who calls with a mask of others finds none that it may join.
    if (gathering == nullptr || (mask & bit) == 0) {
        gathering = start_gathering(warp, {collective, mask, 0, site}, lane);
    }
    warp.payloads[lane] = payload;
    gathering->arrived |= bit;
    if (gathering->arrived != mask) {
        wait(collective, site);
        return;
    }
    *gathering = warp.gatherings[--warp.num_gatherings];
    execute(*this, warp_idx, mask, warp.payloads);
    release(warp_idx, mask & ~bit);
}

void Block::fail_barrier(Site site) const {
    fail(Fault::divergence, site,
         std::string("comes to __syncthreads ") +
             (num_ended_ > 0 ? "after others have ended: " : "while others wait in another one: ") +
             describe_threads(threads_, launch_->num_threads));
}

void Block::fail_deadlock() const {
    fail(Fault::divergence, running_->site,
         "every thread waits for others: " + describe_threads(threads_, launch_->num_threads));
}

void Block::fail_exit(Site site, Collective collective) const {
    fail(Fault::divergence, site,
         std::string("the thread ends while others wait for it in ") + name_of(collective) + ": " +
             describe_threads(threads_, launch_->num_threads));
}

}  // namespace astrai::host
