#include "host/site.h"

#include <algorithm>
#include <cstring>

namespace astrai::host {

std::string describe(Site site) {
    const char* slash = std::strrchr(site.file, '/');
    const std::string name = slash == nullptr ? site.file : slash + 1;
    return site.line == 0 ? name : name + ":" + std::to_string(site.line);
}

uint16_t SiteTable::find_or_add(Site site) {
    const auto found = std::find(sites_.begin(), sites_.end(), site);
    if (found != sites_.end()) {
        return static_cast<uint16_t>(found - sites_.begin());
    }
    if (sites_.size() > UINT16_MAX) {
        return 0;
    }
    sites_.push_back(site);
    return static_cast<uint16_t>(sites_.size() - 1);
}

}  // namespace astrai::host
