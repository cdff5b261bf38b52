// Runs the blocks of a kernel on a few CPU threads.
#pragma once

#include "host/block.h"

namespace astrai {

using Stream = void*;

template <class Function>
struct NamedKernel {
    Function function;
    const char* name;
};

namespace host {

// Raises the CheckError, or whatever else, of the failing block with the lowest index; blocks are counted
// with x fastest. Blocks after it may or may not have run.
void run_grid(const Launch& launch);

template <class Params>
void run_thread(const void* kernel, const void* params) {
    (*static_cast<void (*const*)(Params)>(kernel))(*static_cast<const Params*>(params));
}

}  // namespace host

// Runs a kernel to its end; an empty grid runs nothing. Raises host::CheckError.
template <class Params>
void launch(NamedKernel<void (*)(Params)> kernel, dim3 grid, int threads, int shared_bytes, Stream,
            const Params& params) {
    const uint3 blocks = {grid.x, grid.y, grid.z};
    host::run_grid({kernel.name, host::run_thread<Params>, &kernel.function, &params, blocks, threads,
                    shared_bytes, host::MemoryScope::ranges()});
}

}  // namespace astrai
