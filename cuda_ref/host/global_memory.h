// Global memory: which addresses the kernels of a call may touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/site.h"

namespace astrai::host {

struct MemoryRange {
    uintptr_t address;
    size_t num_bytes;
    bool is_writable;
};

// While it lives, what this CPU thread launches may touch these ranges only. With no scope nothing is known
// of the memory, and only alignment is checked. Scopes nest; the innermost counts.
class MemoryScope {
public:
    explicit MemoryScope(std::vector<MemoryRange> ranges);
    ~MemoryScope();
    MemoryScope(const MemoryScope&) = delete;
    MemoryScope& operator=(const MemoryScope&) = delete;

    // Of the calling CPU thread; null if there is none.
    static const std::vector<MemoryRange>* ranges();

private:
    std::vector<MemoryRange> ranges_;
    const MemoryScope* outer_;
};

// The checks of one CPU thread.
class GlobalMemory {
public:
    // The ranges must outlive their use; null allows every address.
    void allow(const std::vector<MemoryRange>* ranges);

    // Raises unless num_bytes, 1, 2, 4, 8 or 16, lie in one range and at a multiple of their number.
    void check(const void* pointer, uint32_t num_bytes, bool is_write, Site site) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
        const MemoryRange& recent = recent_[address >> PAGE_BITS & (NUM_RECENT - 1)];
        // In size_t an address before the range is far behind its end.
        const size_t offset = address - recent.address;
        const bool is_inside = offset < recent.num_bytes && recent.num_bytes - offset >= num_bytes;
        const bool is_allowed = is_inside && (recent.is_writable || !is_write);
        if (__builtin_expect(!is_allowed || address % num_bytes != 0, 0)) {
            find(address, num_bytes, is_write, site);
        }
    }

private:
    static constexpr int PAGE_BITS = 12, NUM_RECENT = 64;

    void find(uintptr_t address, uint32_t num_bytes, bool is_write, Site site);
    [[noreturn]] void fail_access(uintptr_t address, uint32_t num_bytes, bool is_write, Site site) const;

    // The range last found for a page of its number.
    MemoryRange recent_[NUM_RECENT] = {};
    const std::vector<MemoryRange>* ranges_ = nullptr;
};

}  // namespace astrai::host
