// What a failed check of the CPU runtime raises.
#pragma once

#include <stdexcept>
#include <string>

#include "host/site.h"

namespace astrai::host {

enum class Fault {
    launch_refused,
    shared_out_of_bounds,
    shared_misaligned,
    shared_uninitialised,
    shared_race,
    copy_in_flight,
    copy_unfinished,
    copy_source_changed,
    global_out_of_bounds,
    global_misaligned,
    global_read_only,
    divergence,
    invalid_collective,
};

const char* name_of(Fault fault);

// A kernel broke a rule of CUDA. what(): the fault, the kernel, the block, the thread, its place in the
// source, and what happened.
class CheckError : public std::runtime_error {
public:
    CheckError(Fault fault, const std::string& text) : std::runtime_error(text), fault_(fault) {}
    Fault fault() const { return fault_; }

private:
    Fault fault_;
};

// Ends the launch on behalf of the thread that runs.
[[noreturn, gnu::cold]] void fail(Fault fault, Site site, const std::string& detail);

}  // namespace astrai::host
