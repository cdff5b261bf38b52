// Kernels that keep the rules of cp.async and ldmatrix, or break one if is_broken; see faults_shared.cuh.
#pragma once

#include "faults_shared.cuh"

namespace astrai {
namespace mini {

// x has 256 floats. Each thread copies four.
ASTRAI_DEVICE Shared<float> copy_target() { return shared_array<float>(0, 256); }
ASTRAI_DEVICE const float* copy_source(Args args) { return args.x_as<float>() + threadIdx.x * 4; }

ASTRAI_GLOBAL(64) copy_without_wait(Args args) {
    cp_async_16(copy_target(), threadIdx.x * 4, copy_source(args), true);  // OTHER copy_without_wait
    cp_async_commit();
    if (!args.is_broken) {
        cp_async_wait<0>();
    }
    keep(args, copy_target().load(threadIdx.x * 4));  // FAULT copy_without_wait
    cp_async_wait<0>();
}

ASTRAI_GLOBAL(64) copy_without_commit(Args args) {
    cp_async_16(copy_target(), threadIdx.x * 4, copy_source(args), true);  // OTHER copy_without_commit
    if (!args.is_broken) {
        cp_async_commit();
    }
    cp_async_wait<0>();
    keep(args, copy_target().load(threadIdx.x * 4));  // FAULT copy_without_commit
}

ASTRAI_GLOBAL(64) copy_of_pending_group(Args args) {
    const Shared<float> target = copy_target();
    const int first = threadIdx.x * 2 / 8 * 8;
    if (threadIdx.x % 4 == 0) {
        cp_async_16(target, first, copy_source(args), true);
        cp_async_commit();
        cp_async_16(target, first + 4, copy_source(args), true);  // OTHER copy_of_pending_group
        cp_async_commit();
        cp_async_wait<1>();
        keep(args, target.load(first + (args.is_broken ? 4 : 0)));  // FAULT copy_of_pending_group
        cp_async_wait<0>();
    }
}

// The wait is of the thread that started the copy alone.
ASTRAI_GLOBAL(64) copy_without_barrier(Args args) {
    cp_async_16(copy_target(), threadIdx.x * 4, copy_source(args), true);
    cp_async_commit();
    cp_async_wait<0>();  // OTHER copy_without_barrier
    if (!args.is_broken) {
        __syncthreads();
    }
    keep(args, copy_target().load(threadIdx.x % 32 * 4));  // FAULT copy_without_barrier
}

// A barrier alone, with the wait of each thread after it.
ASTRAI_GLOBAL(64) copy_waited_for_too_late(Args args) {
    cp_async_16(copy_target(), threadIdx.x * 4, copy_source(args), true);  // OTHER copy_waited_for_too_late
    cp_async_commit();
    if (args.is_broken) {
        __syncthreads();
        if (threadIdx.x == 63) {
            cp_async_wait<0>();
        }
    } else {
        cp_async_wait<0>();
        __syncthreads();
    }
    if (threadIdx.x == 63) {
        keep(args, copy_target().load(0));  // FAULT copy_waited_for_too_late
    }
    cp_async_wait<0>();
}

ASTRAI_GLOBAL(64) copy_never_waited_for(Args args) {
    cp_async_16(copy_target(), threadIdx.x * 4, copy_source(args), true);  // FAULT copy_never_waited_for
    cp_async_commit();
    if (!args.is_broken) {
        cp_async_wait<0>();
    }
}

ASTRAI_GLOBAL(64) copy_overwritten(Args args) {
    cp_async_16(copy_target(), threadIdx.x * 4, copy_source(args), true);  // OTHER copy_overwritten
    cp_async_commit();
    if (!args.is_broken) {
        cp_async_wait<0>();
    }
    copy_target().store(threadIdx.x * 4 + 3, 2.0f);  // FAULT copy_overwritten
    cp_async_wait<0>();
}

ASTRAI_GLOBAL(64) copy_over_what_is_read(Args args) {
    const Shared<float> target = copy_target();
    for (int i = threadIdx.x; i < 256; i += 64) {
        target.store(i, 1.0f);
    }
    __syncthreads();
    keep(args, target.load(threadIdx.x < 63 ? threadIdx.x * 4 + 4 : 0));  // OTHER copy_over_what_is_read
    if (!args.is_broken) {
        __syncthreads();
    }
    cp_async_16(target, threadIdx.x * 4, copy_source(args), true);  // FAULT copy_over_what_is_read
    cp_async_commit();
    cp_async_wait<0>();
}

// A tile that is not needed is not copied, wherever its source would be.
ASTRAI_GLOBAL(64) copy_past_the_source(Args args) {
    const bool is_past = threadIdx.x == 63;
    const float* source = copy_source(args) + (is_past ? 4 : 0);
    const bool is_needed = args.is_broken || !is_past;
    cp_async_16(copy_target(), threadIdx.x * 4, source, is_needed);  // FAULT copy_past_the_source
    cp_async_commit();
    cp_async_wait<0>();
}

ASTRAI_GLOBAL(64) copy_past_the_target(Args args) {
    const int first = threadIdx.x * 4 + (args.is_broken ? 4 : 0);
    cp_async_16(copy_target(), first, copy_source(args), true);  // FAULT copy_past_the_target
    cp_async_commit();
    cp_async_wait<0>();
}

ASTRAI_GLOBAL(64) copy_from_misaligned(Args args) {
    const float* source = args.x_as<float>() + (args.is_broken ? 1 : 0);
    cp_async_16(copy_target(), threadIdx.x * 4, source, true);  // FAULT copy_from_misaligned
    cp_async_commit();
    cp_async_wait<0>();
}

ASTRAI_GLOBAL(64) copy_to_misaligned(Args args) {
    const int first = threadIdx.x * 2 * (args.is_broken ? 1 : 2);
    cp_async_16(copy_target(), first, copy_source(args), true);  // FAULT copy_to_misaligned
    cp_async_commit();
    cp_async_wait<0>();
}

// The source may be read at any time before the wait.
ASTRAI_GLOBAL(64) copy_of_a_moving_source(Args args) {
    float* source = args.out_as<float>() + threadIdx.x * 4;
    cp_async_16(copy_target(), threadIdx.x * 4, source, true);  // OTHER copy_of_a_moving_source
    cp_async_commit();
    if (args.is_broken) {
        store_global(source, 17.0f);
    }
    cp_async_wait<0>();  // FAULT copy_of_a_moving_source
    store_global(source, 18.0f);
}

ASTRAI_DEVICE Shared<bf16> write_rows(int num_rows) {
    const Shared<bf16> rows = shared_array<bf16>(0, 40 * 8);
    for (int i = threadIdx.x; i < num_rows * 8; i += 32) {
        rows.store(i, from_float<bf16>(1.0f));
    }
    return rows;
}

ASTRAI_DEVICE void keep_registers(Args args, const uint32_t (&r)[4]) {
    keep(args, static_cast<float>(r[0] ^ r[1] ^ r[2] ^ r[3]));
}

ASTRAI_GLOBAL(32) matrix_unwritten(Args args) {
    const Shared<bf16> rows = write_rows(args.is_broken ? 31 : 32);
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, rows, threadIdx.x * 8);  // FAULT matrix_unwritten
    keep_registers(args, r);
}

ASTRAI_GLOBAL(32) matrix_misaligned(Args args) {
    const Shared<bf16> rows = write_rows(40);
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4_trans(r, rows, threadIdx.x * 8 + (args.is_broken ? 4 : 0));  // FAULT matrix_misaligned
    keep_registers(args, r);
}

ASTRAI_GLOBAL(32) matrix_past_the_end(Args args) {
    const Shared<bf16> rows = write_rows(40);
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, rows, (threadIdx.x + (args.is_broken ? 9 : 8)) * 8);  // FAULT matrix_past_the_end
    keep_registers(args, r);
}

ASTRAI_GLOBAL(32) matrix_race(Args args) {
    const Shared<bf16> rows = shared_array<bf16>(0, 32 * 8);
    rows.store_as<Bytes16>(threadIdx.x * 8, Bytes16{});  // OTHER matrix_race
    if (!args.is_broken) {
        __syncwarp();
    }
    uint32_t r[4];
    ldmatrix_x4(r, rows, (threadIdx.x & ~1u) * 8);  // FAULT matrix_race
    keep_registers(args, r);
}

}  // namespace mini
}  // namespace astrai
