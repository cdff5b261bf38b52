#include "host/shared_memory.h"

#include <algorithm>

namespace astrai::host {

namespace {

std::string describe_bytes(uint32_t count) {
    return std::to_string(count) + (count == 1 ? " byte" : " bytes");
}

int64_t index_of(const Touch& touch) { return (touch.begin - touch.array.begin) / touch.array.element_bytes; }

std::string describe_touch(const Touch& touch, const char* now) {
    return std::string(now) + " " + describe_bytes(touch.num_bytes) + " at " +
           describe(touch.array, index_of(touch));
}

}  // namespace

void SharedMemory::reserve(int num_bytes) {
    num_bytes_ = num_bytes;
    const size_t num_lines = static_cast<size_t>(num_bytes) / sizeof(Line) + 1;
    lines_.resize(std::max(lines_.size(), num_lines));
    cells_.resize(lines_.size() * sizeof(Line) / CELL_BYTES, Cell{});
}

void SharedMemory::start_block() {
    // Far from the end of the range, whatever one block does.
    if (clock_.now() > UINT32_MAX / 2) {
        clock_.reset();
        std::fill(cells_.begin(), cells_.end(), Cell{});
    }
    clock_.start_block();
}

void SharedMemory::start_copy(const Touch& touch) {
    write(touch);
    for (uint32_t cell = touch.begin / CELL_BYTES; cell < end_cell(touch); ++cell) {
        cells_[cell].write.time = IN_FLIGHT;
    }
}

void SharedMemory::finish_copy(const Touch& touch) {
    const Access access = make_access(touch);
    std::fill(&cells_[touch.begin / CELL_BYTES], &cells_[end_cell(touch)], Cell{access, {}});
}

void SharedMemory::check_recent_read(const Cell& cell, const Touch& touch) const {
    if (cell.write.time == IN_FLIGHT) {
        fail_in_flight(touch, "reads", cell.write);
    }
    if (cell.write.time < clock_.block_start()) {
        fail(Fault::shared_uninitialised, touch.site,
             describe_touch(touch, "reads") + ", not all of it written");
    }
    if (!clock_.is_before(cell.write, touch.thread)) {
        fail_race(touch, "reads", cell.write, "wrote");
    }
}

void SharedMemory::check_recent_write(const Cell& cell, const Touch& touch) const {
    if (cell.write.time == IN_FLIGHT) {
        fail_in_flight(touch, "writes", cell.write);
    }
    if (!clock_.is_before(cell.write, touch.thread)) {
        fail_race(touch, "writes", cell.write, "wrote");
    }
    for (const Access read : cell.read) {
        if (!clock_.is_before(read, touch.thread)) {
            fail_race(touch, "writes", read, "read");
        }
    }
}

void SharedMemory::fail_race(const Touch& touch, const char* now, Access earlier, const char* before) const {
    const bool one_warp = is_same_warp(earlier.thread, touch.thread);
    fail(Fault::shared_race, touch.site,
         describe_touch(touch, now) + ", which thread " + std::to_string(earlier.thread) + " " + before +
             " at " + describe(sites_[earlier.site]) + " with no " +
             (one_warp ? "__syncwarp or __syncthreads" : "__syncthreads") + " between");
}

void SharedMemory::fail_in_flight(const Touch& touch, const char* now, Access copy) const {
    fail(Fault::copy_in_flight, touch.site,
         describe_touch(touch, now) + ", which thread " + std::to_string(copy.thread) +
             " copies asynchronously since " + describe(sites_[copy.site]) + " and has not waited for");
}

std::string describe(const ArrayExtent& array, int64_t index) {
    return "element " + std::to_string(index) + " of the array of " + std::to_string(array.count) +
           " elements of " + describe_bytes(array.element_bytes) + " at byte " + std::to_string(array.begin);
}

void check_array(int64_t byte_offset, int64_t count, uint32_t element_bytes, int num_bytes, Site site) {
    const bool is_inside = byte_offset >= 0 && count >= 0 && byte_offset + count * element_bytes <= num_bytes;
    if (is_inside && byte_offset % element_bytes == 0) {
        return;
    }
    const std::string array = "array of " + std::to_string(count) + " elements of " +
                              describe_bytes(element_bytes) + " at byte " + std::to_string(byte_offset);
    if (is_inside) {
        fail(Fault::shared_misaligned, site, array + ", which is no multiple of the size of an element");
    }
    fail(Fault::shared_out_of_bounds, site,
         array + " in the " + describe_bytes(static_cast<uint32_t>(num_bytes)) + " of the launch");
}

void check_slice(const ArrayExtent& array, int64_t first, int64_t count, Site site) {
    if (first < 0 || count < 0 || first + count > array.count) {
        fail(Fault::shared_out_of_bounds, site,
             "slice of " + std::to_string(count) + " elements from " + describe(array, first));
    }
}

void fail_bounds(const ArrayExtent& array, int64_t index, uint32_t num_bytes, Site site) {
    fail(Fault::shared_out_of_bounds, site, describe_bytes(num_bytes) + " at " + describe(array, index));
}

void fail_alignment(const ArrayExtent& array, int64_t index, uint32_t num_bytes, Site site) {
    const int64_t address = array.begin + index * array.element_bytes;
    fail(Fault::shared_misaligned, site,
         describe_bytes(num_bytes) + " at " + describe(array, index) + ": address " +
             std::to_string(address) + " is not a multiple of " + std::to_string(num_bytes));
}

}  // namespace astrai::host
