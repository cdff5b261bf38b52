// Who waits where, for messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace astrai::host {

struct Thread;

// "lanes 0-15, 17"
std::string describe_lanes(uint32_t mask);

// "threads 0-31 wait in __syncthreads at kernel.cu:12; threads 32-63 have ended"
std::string describe_threads(const std::vector<Thread>& threads, int num_threads);

}  // namespace astrai::host
