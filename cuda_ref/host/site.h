// Places in the source of a kernel.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace astrai::host {

// As a default argument Site::here() is the place of the call.
struct Site {
    const char* file;
    int line;

    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
    friend bool operator==(Site a, Site b) { return a.file == b.file && a.line == b.line; }
    friend bool operator!=(Site a, Site b) { return !(a == b); }
};

// "name.cuh:12"; the name alone for line 0, which is no place in a file.
std::string describe(Site site);

// Numbers sites, so that what is remembered of a shared access is 8 bytes.
class SiteTable {
public:
    SiteTable() : sites_(1, Site{"unknown", 0}) {}

    uint16_t intern(Site site) {
        const uintptr_t hash = reinterpret_cast<uintptr_t>(site.file) / 8 + static_cast<unsigned>(site.line);
        Recent& recent = recent_[hash % NUM_RECENT];
        if (__builtin_expect(recent.site != site, 0)) {
            recent = {site, find_or_add(site)};
        }
        return recent.id;
    }
    Site operator[](uint16_t id) const { return sites_[id]; }

private:
    static constexpr int NUM_RECENT = 256;
    struct Recent {
        Site site;
        uint16_t id;
    };

    uint16_t find_or_add(Site site);

    Recent recent_[NUM_RECENT] = {};
    std::vector<Site> sites_;
};

}  // namespace astrai::host
