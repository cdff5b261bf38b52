#include "host/errors.h"

#include "host/block.h"

namespace astrai::host {

const char* name_of(Fault fault) {
    switch (fault) {
        case Fault::launch_refused: return "launch refused";
        case Fault::shared_out_of_bounds: return "shared memory out of bounds";
        case Fault::shared_misaligned: return "shared memory misaligned";
        case Fault::shared_uninitialised: return "shared memory read before it is written";
        case Fault::shared_race: return "shared memory race";
        case Fault::copy_in_flight: return "shared memory touched during an asynchronous copy";
        case Fault::copy_unfinished: return "asynchronous copy unfinished";
        case Fault::copy_source_changed: return "asynchronous copy of a source that changes";
        case Fault::global_out_of_bounds: return "global memory out of bounds";
        case Fault::global_misaligned: return "global memory misaligned";
        case Fault::global_read_only: return "global memory read-only";
        case Fault::divergence: return "divergence";
        case Fault::invalid_collective: return "invalid collective";
    }
    return "unknown fault";
}

void fail(Fault fault, Site site, const std::string& detail) {
    const std::string block = "(" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
                              std::to_string(blockIdx.z) + ")";
    throw CheckError(fault, std::string(name_of(fault)) + ": kernel " + current_block->kernel_name() +
                                ", block " + block + ", thread " +
                                std::to_string(current_block->thread_number()) + ", at " + describe(site) +
                                ": " + detail);
}

}  // namespace astrai::host
