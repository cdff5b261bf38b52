// Shared memory of a block, with a shadow that remembers who touched what, and when.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "host/clock.h"
#include "host/errors.h"
#include "host/site.h"

namespace astrai::host {

constexpr int MAX_SHARED_BYTES = 227 * 1024;

// Elements of one array in shared memory.
struct ArrayExtent {
    uint32_t begin;  // byte offset
    uint32_t count;
    uint32_t element_bytes;
};

// An access to num_bytes at the byte offset begin of shared memory by a thread.
struct Touch {
    ArrayExtent array;
    uint32_t begin, num_bytes;
    unsigned thread;
    Site site;
};

class SharedMemory {
public:
    // Room for the blocks of a launch. Raises std::bad_alloc.
    void reserve(int num_bytes);
    // Everything is unwritten again.
    void start_block();

    unsigned char* bytes() { return lines_[0].bytes; }
    int num_bytes() const { return num_bytes_; }
    BarrierClock& clock() { return clock_; }

    // Raises unless a barrier lies between this access and those it conflicts with, nothing it touches is
    // being copied, and what it reads was written.
    void read(const Touch& touch) {
        const Access access = make_access(touch);
        for (uint32_t cell = touch.begin / CELL_BYTES; cell < end_cell(touch); ++cell) {
            Cell& c = cells_[cell];
            const uint32_t age = c.write.time - clock_.block_start();
            // Else it was written in this block, before the latest __syncthreads.
            if (__builtin_expect(age >= clock_.block_sync() - clock_.block_start(), 0)) {
                check_recent_read(c, touch);
            }
            c.add_reader(access, clock_.block_sync());
        }
    }
    void write(const Touch& touch) {
        const Access access = make_access(touch);
        for (uint32_t cell = touch.begin / CELL_BYTES; cell < end_cell(touch); ++cell) {
            check_write(cells_[cell], touch);
            cells_[cell] = {access, {}};
        }
    }

    // A copy to 16 bytes that starts, as a write; until it ends nothing may touch them.
    void start_copy(const Touch& touch);
    // Its bytes are there, as if the thread wrote them now.
    void finish_copy(const Touch& touch);

private:
    // Two bytes: elements are no smaller.
    static constexpr uint32_t CELL_BYTES = 2;
    // Time of a write that is still to come.
    static constexpr uint32_t IN_FLIGHT = UINT32_MAX;

    struct alignas(128) Line {
        unsigned char bytes[128];
    };

    // Of the readers since the latest write two are remembered, such that a later write that conflicts with
    // any of them conflicts with one of the two: of different warps if there were such, else the latest ones.
    struct Cell {
        Access write;
        Access read[2];

        void add_reader(Access access, uint32_t block_sync) {
            if (read[0].thread == access.thread || read[0].time < block_sync) {
                read[0] = access;
            } else if (read[1].thread == access.thread || read[1].time < block_sync) {
                read[1] = access;
            } else if (is_same_warp(read[0].thread, read[1].thread)) {
                const bool is_other_warp = !is_same_warp(read[0].thread, access.thread);
                read[is_other_warp || read[1].time < read[0].time] = access;
            }
        }
    };

    static uint32_t end_cell(const Touch& touch) { return (touch.begin + touch.num_bytes) / CELL_BYTES; }
    Access make_access(const Touch& touch) {
        return {clock_.now(), static_cast<uint16_t>(touch.thread), sites_.intern(touch.site)};
    }
    void check_recent_read(const Cell& cell, const Touch& touch) const;
    void check_write(const Cell& cell, const Touch& touch) const {
        const uint32_t sync = clock_.block_sync();
        if (__builtin_expect(
                cell.write.time >= sync || cell.read[0].time >= sync || cell.read[1].time >= sync, 0)) {
            check_recent_write(cell, touch);
        }
    }
    void check_recent_write(const Cell& cell, const Touch& touch) const;
    [[noreturn]] void fail_race(const Touch& touch, const char* now, Access earlier,
                                const char* before) const;
    [[noreturn]] void fail_in_flight(const Touch& touch, const char* now, Access copy) const;

    std::vector<Line> lines_;
    int num_bytes_ = 0;
    std::vector<Cell> cells_;
    BarrierClock clock_;
    SiteTable sites_;
};

// "element 3 of the array of 64 elements of 4 bytes at byte 256"
std::string describe(const ArrayExtent& array, int64_t index);

// Raises unless count elements from byte_offset on lie in num_bytes of shared memory, aligned.
void check_array(int64_t byte_offset, int64_t count, uint32_t element_bytes, int num_bytes, Site site);
// Raises unless count elements from first on lie in the array.
void check_slice(const ArrayExtent& array, int64_t first, int64_t count, Site site);

[[noreturn]] void fail_bounds(const ArrayExtent& array, int64_t index, uint32_t num_bytes, Site site);
[[noreturn]] void fail_alignment(const ArrayExtent& array, int64_t index, uint32_t num_bytes, Site site);

// Byte offset of an access of num_bytes to an element; raises unless it is inside the array and aligned.
inline uint32_t locate(const ArrayExtent& array, int64_t index, uint32_t num_bytes, Site site) {
    const uint64_t array_bytes = static_cast<uint64_t>(array.count) * array.element_bytes;
    const uint64_t begin = static_cast<uint64_t>(index) * array.element_bytes;
    if (__builtin_expect(index < 0 || begin + num_bytes > array_bytes, 0)) {
        fail_bounds(array, index, num_bytes, site);
    }
    const uint32_t offset = array.begin + static_cast<uint32_t>(begin);
    if (__builtin_expect(offset % num_bytes != 0, 0)) {
        fail_alignment(array, index, num_bytes, site);
    }
    return offset;
}

}  // namespace astrai::host
