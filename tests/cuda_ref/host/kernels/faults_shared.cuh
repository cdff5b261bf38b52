// Kernels that keep the rules of shared memory, or break one if is_broken. A line that is to be reported ends
// in "FAULT kernel", the line of the other thread in "OTHER kernel".
#pragma once

#include "args.cuh"

namespace astrai {
namespace mini {

ASTRAI_DEVICE void keep(Args args, float x) { store_global(args.out_as<float>() + threadIdx.x, x); }

ASTRAI_GLOBAL(64) index_past_the_end(Args args) {
    const Shared<float> array = shared_array<float>(0, 32);
    if (threadIdx.x == 3) {
        array.store(args.is_broken ? 32 : 31, 1.0f);  // FAULT index_past_the_end
    }
}

ASTRAI_GLOBAL(64) index_below_zero(Args args) {
    const Shared<float> array = shared_array<float>(128, 32);
    if (threadIdx.x == 3) {
        array.store(args.is_broken ? -1 : 0, 1.0f);  // FAULT index_below_zero
    }
}

ASTRAI_GLOBAL(64) wide_past_the_end(Args args) {
    const Shared<float> array = shared_array<float>(0, 30);
    if (threadIdx.x == 3) {
        array.store_as<Bytes16>(args.is_broken ? 28 : 24, Bytes16{});  // FAULT wide_past_the_end
    }
}

// Tests launch with 1024 bytes.
ASTRAI_GLOBAL(64) array_past_the_launch(Args args) {
    const int count = args.is_broken ? 129 : 128;
    const Shared<float> array = shared_array<float>(512, count);  // FAULT array_past_the_launch
    array.store(threadIdx.x, 1.0f);
}

ASTRAI_GLOBAL(64) array_at_odd_byte(Args args) {
    const Shared<float> array = shared_array<float>(args.is_broken ? 6 : 8, 64);  // FAULT array_at_odd_byte
    array.store(threadIdx.x, 1.0f);
}

ASTRAI_GLOBAL(64) slice_past_the_end(Args args) {
    const Shared<float> array = shared_array<float>(0, 128);
    const Shared<float> slice = array.slice(64, args.is_broken ? 65 : 64);  // FAULT slice_past_the_end
    slice.store(threadIdx.x, 1.0f);
}

ASTRAI_GLOBAL(64) index_past_the_slice(Args args) {
    const Shared<float> slice = shared_array<float>(0, 128).slice(32, 64);
    if (threadIdx.x == 3) {
        slice.store(args.is_broken ? 64 : 63, 1.0f);  // FAULT index_past_the_slice
    }
}

ASTRAI_GLOBAL(64) wide_misaligned(Args args) {
    const Shared<float> array = shared_array<float>(0, 64);
    array.store(threadIdx.x, 1.0f);
    __syncthreads();
    const Bytes16 x = array.load_as<Bytes16>(args.is_broken ? 6 : 8);  // FAULT wide_misaligned
    keep(args, static_cast<float>(x.word[0]));
}

ASTRAI_GLOBAL(64) read_unwritten(Args args) {
    const Shared<float> array = shared_array<float>(0, 64);
    if (!args.is_broken || threadIdx.x != 40) {
        array.store(threadIdx.x, 1.0f);
    }
    __syncthreads();
    keep(args, array.load(63 - threadIdx.x));  // FAULT read_unwritten
}

// Shared memory does not live longer than its block: tests run two blocks.
ASTRAI_GLOBAL(64) read_of_former_block(Args args) {
    const Shared<float> array = shared_array<float>(0, 64);
    if (!args.is_broken || blockIdx.x == 0) {
        array.store(threadIdx.x, 1.0f);
    }
    __syncthreads();
    keep(args, array.load(threadIdx.x));  // FAULT read_of_former_block
}

ASTRAI_GLOBAL(64) read_half_written(Args args) {
    const Shared<bf16> array = shared_array<bf16>(0, 128);
    array.store(threadIdx.x * 2, from_float<bf16>(1.0f));
    if (!args.is_broken) {
        array.store(threadIdx.x * 2 + 1, from_float<bf16>(1.0f));
    }
    const uint32_t pair = array.load_as<uint32_t>(threadIdx.x * 2);  // FAULT read_half_written
    keep(args, static_cast<float>(pair));
}

ASTRAI_GLOBAL(64) race_read_after_write(Args args) {
    const Shared<float> array = shared_array<float>(0, 64);
    array.store(threadIdx.x, 1.0f);  // OTHER race_read_after_write
    if (!args.is_broken) {
        __syncthreads();
    }
    keep(args, array.load(threadIdx.x % 32));  // FAULT race_read_after_write
}

ASTRAI_GLOBAL(64) race_write_after_read(Args args) {
    const Shared<float> array = shared_array<float>(0, 64);
    array.store(threadIdx.x, 1.0f);
    __syncthreads();
    const float x = array.load(threadIdx.x < 63 ? threadIdx.x + 1 : 0);  // OTHER race_write_after_read
    if (!args.is_broken) {
        __syncthreads();
    }
    array.store(threadIdx.x, x);  // FAULT race_write_after_read
}

ASTRAI_GLOBAL(64) race_write_after_write(Args args) {
    const Shared<float> array = shared_array<float>(0, 64);
    array.store(args.is_broken ? threadIdx.x % 32 : threadIdx.x, 1.0f);  // FAULT race_write_after_write
}

// A barrier of a warp does not order two warps.
ASTRAI_GLOBAL(64) race_of_warps(Args args) {
    const Shared<float> array = shared_array<float>(0, 64);
    array.store(threadIdx.x, 1.0f);  // OTHER race_of_warps
    if (args.is_broken) {
        __syncwarp();
    } else {
        __syncthreads();
    }
    if (threadIdx.x >= 32) {
        keep(args, array.load(threadIdx.x - 32));  // FAULT race_of_warps
    }
}

ASTRAI_GLOBAL(64) race_in_warp(Args args) {
    const Shared<float> array = shared_array<float>(0, 64);
    array.store(threadIdx.x, 1.0f);  // OTHER race_in_warp
    if (!args.is_broken) {
        __syncwarp();
    }
    keep(args, array.load(threadIdx.x & ~3u));  // FAULT race_in_warp
}

// Lanes meet in a shuffle, but it orders no memory.
ASTRAI_GLOBAL(64) race_over_shuffle(Args args) {
    const Shared<float> array = shared_array<float>(0, 64);
    array.store(threadIdx.x, 1.0f);  // OTHER race_over_shuffle
    const float moved = __shfl_xor_sync(FULL_WARP, 1.0f, 1);
    if (!args.is_broken) {
        __syncwarp();
    }
    keep(args, moved + array.load(threadIdx.x ^ 1u));  // FAULT race_over_shuffle
}

// A barrier of half a warp does not order the other half.
ASTRAI_GLOBAL(32) race_of_half_warps(Args args) {
    const Shared<float> array = shared_array<float>(0, 32);
    array.store(threadIdx.x, 1.0f);  // OTHER race_of_half_warps
    __syncwarp(threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u);
    const unsigned mirrored = args.is_broken && threadIdx.x >= 16 ? 31u : 15u;
    keep(args, array.load(threadIdx.x ^ mirrored));  // FAULT race_of_half_warps
}

// It orders what came before it, nothing after it.
ASTRAI_GLOBAL(32) race_after_half_barriers(Args args) {
    const Shared<float> array = shared_array<float>(0, 32);
    const unsigned half = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
    __syncwarp(half);
    array.store(threadIdx.x, 1.0f);  // OTHER race_after_half_barriers
    if (!args.is_broken) {
        __syncwarp(half);
    }
    keep(args, array.load(threadIdx.x < 15 ? 15 : threadIdx.x));  // FAULT race_after_half_barriers
}

// Order passes on: lane 0 meets lane 1, then lane 1 meets lane 2.
ASTRAI_GLOBAL(32) race_at_end_of_chain(Args args) {
    const Shared<float> array = shared_array<float>(0, 32);
    if (threadIdx.x == 0) {
        array.store(0, 1.0f);  // OTHER race_at_end_of_chain
    }
    if (threadIdx.x < 2) {
        __syncwarp(0x3u);
    }
    if (threadIdx.x == 1 || threadIdx.x == 2) {
        __syncwarp(0x6u);
    }
    if (threadIdx.x == (args.is_broken ? 3 : 2)) {
        keep(args, array.load(0));  // FAULT race_at_end_of_chain
    }
}

// Of many readers only some are in the warp whose barrier comes next.
ASTRAI_GLOBAL(96) race_with_far_reader(Args args) {
    const Shared<float> array = shared_array<float>(0, 4);
    if (threadIdx.x == 0) {
        array.store(0, 1.0f);
    }
    __syncthreads();
    float x = 0.0f;
    if (threadIdx.x < 32 || threadIdx.x == 70 || !args.is_broken) {
        x = array.load(0);  // OTHER race_with_far_reader
    }
    if (!args.is_broken) {
        __syncthreads();
    }
    __syncwarp();
    if (threadIdx.x == 0) {
        array.store(0, x);  // FAULT race_with_far_reader
    }
}

// The writer is one of the two readers.
ASTRAI_GLOBAL(32) race_with_other_reader(Args args) {
    const Shared<float> array = shared_array<float>(0, 4);
    if (threadIdx.x == 0) {
        array.store(0, 1.0f);
    }
    __syncwarp();
    float x = 0.0f;
    if (threadIdx.x == 31 || threadIdx.x == 3) {
        x = array.load(0);  // OTHER race_with_other_reader
    }
    if (!args.is_broken) {
        __syncwarp();
    }
    x = __shfl_sync(FULL_WARP, x, 3);
    if (threadIdx.x == 31) {
        array.store(0, x);  // FAULT race_with_other_reader
    }
}

// Every lane reads, one of them writes.
ASTRAI_GLOBAL(32) race_with_own_warp(Args args) {
    const Shared<float> array = shared_array<float>(0, 4);
    if (threadIdx.x == 0) {
        array.store(0, 1.0f);
    }
    __syncwarp();
    float x = array.load(0);  // OTHER race_with_own_warp
    if (!args.is_broken) {
        __syncwarp();
    }
    x = __shfl_sync(FULL_WARP, x, 0);
    if (threadIdx.x == 31) {
        array.store(0, x);  // FAULT race_with_own_warp
    }
}

}  // namespace mini
}  // namespace astrai
