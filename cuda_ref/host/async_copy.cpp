#include "host/async_copy.h"

#include <algorithm>
#include <cstring>

namespace astrai::host {

namespace {

Bytes16 load_source(const void* source) {
    Bytes16 bytes = {};
    if (source != nullptr) {
        std::memcpy(&bytes, source, sizeof(bytes));
    }
    return bytes;
}

}  // namespace

void AsyncCopies::clear() {
    copies_.clear();
    num_groups_ = 0;
}

void AsyncCopies::start(SharedMemory& shared, const Touch& target, const void* source) {
    shared.start_copy(target);
    copies_.push_back({target, source, load_source(source), num_groups_});
}

void AsyncCopies::wait(SharedMemory& shared, unsigned pending, Site site) {
    const unsigned num_finished = num_groups_ > pending ? num_groups_ - pending : 0;
    auto copy = copies_.begin();
    for (; copy != copies_.end() && copy->group < num_finished; ++copy) {
        // The hardware may read the source at any time in between.
        const Bytes16 bytes = load_source(copy->source);
        if (std::memcmp(&bytes, &copy->bytes, sizeof(bytes)) != 0) {
            fail(Fault::copy_source_changed, site,
                 "the source of the copy started at " + describe(copy->target.site) +
                     " was written before this wait");
        }
        std::memcpy(shared.bytes() + copy->target.begin, &bytes, sizeof(bytes));
        Touch landed = copy->target;
        landed.site = site;
        shared.finish_copy(landed);
    }
    copies_.erase(copies_.begin(), copy);
}

void AsyncCopies::check_finished() const {
    if (copies_.empty()) {
        return;
    }
    const auto is_committed = [this](const Copy& copy) { return copy.group < num_groups_; };
    const Copy& first = copies_.front();
    fail(Fault::copy_unfinished, first.target.site,
         "the thread ends without a wait for " + std::to_string(copies_.size()) + " asynchronous copies, " +
             std::to_string(std::count_if(copies_.begin(), copies_.end(), is_committed)) +
             " of them committed");
}

}  // namespace astrai::host
