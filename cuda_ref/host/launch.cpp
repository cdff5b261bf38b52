#include "host/launch.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace astrai::host {

namespace {

constexpr unsigned MAX_WORKERS = 8, MAX_GRID_X = INT32_MAX, MAX_GRID_YZ = 65535;

[[noreturn]] void refuse(const Launch& launch, const std::string& detail) {
    throw CheckError(Fault::launch_refused,
                     std::string(name_of(Fault::launch_refused)) + ": kernel " + launch.name + ": " + detail);
}

void check_launch(const Launch& launch) {
    if (launch.num_threads < 1 || launch.num_threads > MAX_THREADS) {
        refuse(launch, "threads of a block: wanted 1 to " + std::to_string(MAX_THREADS) + ", got " +
                           std::to_string(launch.num_threads));
    }
    if (launch.shared_bytes < 0 || launch.shared_bytes > MAX_SHARED_BYTES) {
        refuse(launch, "shared memory of a block: wanted 0 to " + std::to_string(MAX_SHARED_BYTES) +
                           " bytes, got " + std::to_string(launch.shared_bytes));
    }
    if (launch.grid.x > MAX_GRID_X || launch.grid.y > MAX_GRID_YZ || launch.grid.z > MAX_GRID_YZ) {
        refuse(launch, "grid: wanted at most (2147483647, 65535, 65535), got (" +
                           std::to_string(launch.grid.x) + ", " + std::to_string(launch.grid.y) + ", " +
                           std::to_string(launch.grid.z) + ")");
    }
}

// Blocks with their stacks and shared memory, kept between launches.
class BlockPool {
public:
    std::unique_ptr<Block> take() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (free_.empty()) {
            return std::make_unique<Block>();
        }
        std::unique_ptr<Block> block = std::move(free_.back());
        free_.pop_back();
        return block;
    }
    void give_back(std::unique_ptr<Block> block) {
        const std::lock_guard<std::mutex> lock(mutex_);
        free_.push_back(std::move(block));
    }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Block>> free_;
};

BlockPool& block_pool() {
    static BlockPool pool;
    return pool;
}

// The blocks of a launch, handed out in ascending order: when one fails, those before it were.
class Grid {
public:
    explicit Grid(const Launch& launch)
        : launch_(launch), num_blocks_(uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z) {}

    uint64_t num_blocks() const { return num_blocks_; }

    void work() noexcept {
        uint64_t index = 0;
        try {
            std::unique_ptr<Block> block = block_pool().take();
            block->prepare(launch_);
            while ((index = next_.fetch_add(1)) < num_blocks_) {
                block->run(position(index));
            }
            block_pool().give_back(std::move(block));
        } catch (...) {
            fail(index, std::current_exception());
        }
    }

    void rethrow() const {
        if (error_) {
            std::rethrow_exception(error_);
        }
    }

private:
    uint3 position(uint64_t index) const {
        const uint64_t x = launch_.grid.x, y = launch_.grid.y;
        return {static_cast<unsigned>(index % x), static_cast<unsigned>(index / x % y),
                static_cast<unsigned>(index / x / y)};
    }

    void fail(uint64_t index, std::exception_ptr error) {
        next_.store(num_blocks_);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (index <= failed_) {
            failed_ = index;
            error_ = std::move(error);
        }
    }

    const Launch& launch_;
    const uint64_t num_blocks_;
    std::atomic<uint64_t> next_{0};
    std::mutex mutex_;
    uint64_t failed_ = UINT64_MAX;
    std::exception_ptr error_;
};

}  // namespace

void run_grid(const Launch& launch) {
    Grid grid(launch);
    if (grid.num_blocks() == 0) {
        return;
    }
    check_launch(launch);
    const uint64_t num_workers = std::min({uint64_t{std::max(std::thread::hardware_concurrency(), 1u)},
                                           grid.num_blocks(), uint64_t{MAX_WORKERS}});
    std::vector<std::thread> others;
    others.reserve(num_workers - 1);
    try {
        while (others.size() + 1 < num_workers) {
            others.emplace_back([&grid] { grid.work(); });
        }
    } catch (const std::system_error&) {
        // No more threads are to be had; those there are run all blocks.
    }
    grid.work();
    for (std::thread& other : others) {
        other.join();
    }
    grid.rethrow();
}

}  // namespace astrai::host
