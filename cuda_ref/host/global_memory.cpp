#include "host/global_memory.h"

#include <algorithm>
#include <string>

#include "host/errors.h"

namespace astrai::host {

namespace {

thread_local const MemoryScope* innermost_scope = nullptr;

bool contains(const MemoryRange& range, uintptr_t address, uint32_t num_bytes) {
    const size_t offset = address - range.address;
    return offset < range.num_bytes && range.num_bytes - offset >= num_bytes;
}

// How far an access reaches out of a range on either side.
uintptr_t distance(const MemoryRange& range, uintptr_t address, uint32_t num_bytes) {
    const uintptr_t end = range.address + range.num_bytes;
    const uintptr_t before = address < range.address ? range.address - address : 0;
    const uintptr_t behind = address + num_bytes > end ? address + num_bytes - end : 0;
    return std::max(before, behind);
}

std::string describe_place(const MemoryRange& range, uintptr_t address) {
    if (address < range.address) {
        return std::to_string(range.address - address) + " bytes before the start of";
    }
    if (address >= range.address + range.num_bytes) {
        return std::to_string(address - range.address - range.num_bytes) + " bytes past the end of";
    }
    return "at byte " + std::to_string(address - range.address) + " of";
}

std::string describe_range(const std::vector<MemoryRange>& ranges, const MemoryRange& range) {
    return "range " + std::to_string(&range - ranges.data()) + " (" + std::to_string(range.num_bytes) +
           " bytes, " + (range.is_writable ? "writable" : "read-only") + ")";
}

}  // namespace

MemoryScope::MemoryScope(std::vector<MemoryRange> ranges)
    : ranges_(std::move(ranges)), outer_(innermost_scope) {
    innermost_scope = this;
}

MemoryScope::~MemoryScope() { innermost_scope = outer_; }

const std::vector<MemoryRange>* MemoryScope::ranges() {
    return innermost_scope == nullptr ? nullptr : &innermost_scope->ranges_;
}

void GlobalMemory::allow(const std::vector<MemoryRange>* ranges) {
    ranges_ = ranges;
    // Null is in no range.
    const MemoryRange everything = {1, SIZE_MAX - 1, true};
    std::fill(std::begin(recent_), std::end(recent_), ranges == nullptr ? everything : MemoryRange{});
}

void GlobalMemory::find(uintptr_t address, uint32_t num_bytes, bool is_write, Site site) {
    if (address % num_bytes != 0) {
        fail(Fault::global_misaligned, site,
             std::string(is_write ? "writes " : "reads ") + std::to_string(num_bytes) +
                 " bytes at an address that is " + std::to_string(address % num_bytes) +
                 " more than a multiple of " + std::to_string(num_bytes));
    }
    if (ranges_ != nullptr) {
        for (const MemoryRange& range : *ranges_) {
            if (contains(range, address, num_bytes) && (range.is_writable || !is_write)) {
                recent_[address >> PAGE_BITS & (NUM_RECENT - 1)] = range;
                return;
            }
        }
    }
    fail_access(address, num_bytes, is_write, site);
}

void GlobalMemory::fail_access(uintptr_t address, uint32_t num_bytes, bool is_write, Site site) const {
    const std::string access = std::string(is_write ? "writes " : "reads ") + std::to_string(num_bytes) +
                               (num_bytes == 1 ? " byte " : " bytes ");
    if (address == 0 || ranges_ == nullptr) {
        fail(Fault::global_out_of_bounds, site, access + "at a null pointer");
    }
    if (ranges_->empty()) {
        fail(Fault::global_out_of_bounds, site, access + "where the call has no memory at all");
    }
    const auto nearest =
        std::min_element(ranges_->begin(), ranges_->end(), [=](const MemoryRange& a, const MemoryRange& b) {
            return distance(a, address, num_bytes) < distance(b, address, num_bytes);
        });
    const Fault fault =
        contains(*nearest, address, num_bytes) ? Fault::global_read_only : Fault::global_out_of_bounds;
    fail(fault, site, access + describe_place(*nearest, address) + " " + describe_range(*ranges_, *nearest));
}

}  // namespace astrai::host
