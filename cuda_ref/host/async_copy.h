// Copies from global to shared memory that a thread started and has not waited for.
#pragma once

#include <vector>

#include "host/shared_memory.h"
#include "host/types.h"

namespace astrai::host {

class AsyncCopies {
public:
    void clear();

    // Starts a copy of 16 bytes from source; of zeros if it is null.
    void start(SharedMemory& shared, const Touch& target, const void* source);
    // Closes the group of the copies started since the last one.
    void commit() { ++num_groups_; }
    // Finishes all groups but the latest pending ones. Copies of no group are not waited for.
    void wait(SharedMemory& shared, unsigned pending, Site site);
    // Raises if a copy is unfinished: the thread ends.
    void check_finished() const;

private:
    struct Copy {
        Touch target;
        const void* source;
        Bytes16 bytes;  // of the source when the copy started
        unsigned group;
    };

    std::vector<Copy> copies_;
    unsigned num_groups_ = 0;
};

}  // namespace astrai::host
