// The kernels of these tests by name, behind a C interface.
#include <cstdio>
#include <cstring>
#include <exception>

#include "faults_collectives.cuh"
#include "faults_copies.cuh"
#include "faults_global.cuh"
#include "faults_shared.cuh"
#include "known.cuh"
#include "tensor_cores.cuh"

namespace astrai {
namespace mini {

const NamedKernel<void (*)(Args)> KERNELS[] = {
    ASTRAI_NAMED(sum_kernel),
    ASTRAI_NAMED(transpose_kernel),
    ASTRAI_NAMED(scan_kernel),
    ASTRAI_NAMED(shuffle_kernel<float>),
    ASTRAI_NAMED(shuffle_kernel<int>),
    ASTRAI_NAMED(shuffle_kernel<double>),
    ASTRAI_NAMED(vote_kernel),
    ASTRAI_NAMED(parting_kernel),
    ASTRAI_NAMED(position_kernel),
    ASTRAI_NAMED(mma_kernel<bf16>),
    ASTRAI_NAMED(mma_kernel<f16>),
    ASTRAI_NAMED(ldmatrix_kernel),
    ASTRAI_NAMED(fill_kernel),
    ASTRAI_NAMED(matmul_kernel<bf16>),
    ASTRAI_NAMED(matmul_kernel<f16>),
    ASTRAI_NAMED(index_past_the_end),
    ASTRAI_NAMED(index_below_zero),
    ASTRAI_NAMED(wide_past_the_end),
    ASTRAI_NAMED(array_past_the_launch),
    ASTRAI_NAMED(array_at_odd_byte),
    ASTRAI_NAMED(slice_past_the_end),
    ASTRAI_NAMED(index_past_the_slice),
    ASTRAI_NAMED(wide_misaligned),
    ASTRAI_NAMED(read_unwritten),
    ASTRAI_NAMED(read_of_former_block),
    ASTRAI_NAMED(read_half_written),
    ASTRAI_NAMED(race_read_after_write),
    ASTRAI_NAMED(race_write_after_read),
    ASTRAI_NAMED(race_write_after_write),
    ASTRAI_NAMED(race_of_warps),
    ASTRAI_NAMED(race_in_warp),
    ASTRAI_NAMED(race_over_shuffle),
    ASTRAI_NAMED(race_of_half_warps),
    ASTRAI_NAMED(race_after_half_barriers),
    ASTRAI_NAMED(race_at_end_of_chain),
    ASTRAI_NAMED(race_with_far_reader),
    ASTRAI_NAMED(race_with_other_reader),
    ASTRAI_NAMED(race_with_own_warp),
    ASTRAI_NAMED(copy_without_wait),
    ASTRAI_NAMED(copy_without_commit),
    ASTRAI_NAMED(copy_of_pending_group),
    ASTRAI_NAMED(copy_without_barrier),
    ASTRAI_NAMED(copy_waited_for_too_late),
    ASTRAI_NAMED(copy_never_waited_for),
    ASTRAI_NAMED(copy_overwritten),
    ASTRAI_NAMED(copy_over_what_is_read),
    ASTRAI_NAMED(copy_past_the_source),
    ASTRAI_NAMED(copy_past_the_target),
    ASTRAI_NAMED(copy_from_misaligned),
    ASTRAI_NAMED(copy_to_misaligned),
    ASTRAI_NAMED(copy_of_a_moving_source),
    ASTRAI_NAMED(matrix_unwritten),
    ASTRAI_NAMED(matrix_misaligned),
    ASTRAI_NAMED(matrix_past_the_end),
    ASTRAI_NAMED(matrix_race),
    ASTRAI_NAMED(read_past_the_end),
    ASTRAI_NAMED(read_before_the_start),
    ASTRAI_NAMED(read_across_the_end),
    ASTRAI_NAMED(read_at_null),
    ASTRAI_NAMED(write_past_the_end),
    ASTRAI_NAMED(write_to_read_only),
    ASTRAI_NAMED(read_misaligned),
    ASTRAI_NAMED(write_misaligned),
    ASTRAI_NAMED(barrier_in_two_branches),
    ASTRAI_NAMED(barrier_after_an_exit),
    ASTRAI_NAMED(exit_before_a_barrier),
    ASTRAI_NAMED(shuffle_without_a_lane),
    ASTRAI_NAMED(shuffle_after_an_exit),
    ASTRAI_NAMED(shuffle_against_barrier),
    ASTRAI_NAMED(shuffle_and_vote),
    ASTRAI_NAMED(two_shuffles),
    ASTRAI_NAMED(shuffle_with_two_masks),
    ASTRAI_NAMED(shuffles_in_a_ring),
    ASTRAI_NAMED(mask_without_the_caller),
    ASTRAI_NAMED(shuffle_from_outside),
    ASTRAI_NAMED(shuffle_of_odd_width),
    ASTRAI_NAMED(vote_of_part_of_a_warp),
};

struct Range {
    uint64_t address, num_bytes;
    int is_writable;
};

struct Call {
    const char* kernel;
    Args args;
    unsigned grid[3];
    int threads, shared_bytes;
    const Range* ranges;
    int num_ranges;  // -1: of no memory is anything known
};

void launch_named(const Call& call) {
    for (const auto& kernel : KERNELS) {
        if (std::strcmp(kernel.name, call.kernel) == 0) {
            const dim3 grid(call.grid[0], call.grid[1], call.grid[2]);
            launch(kernel, grid, call.threads, call.shared_bytes, nullptr, call.args);
            return;
        }
    }
    throw std::invalid_argument(std::string("kernel: no ") + call.kernel);
}

void run(const Call& call) {
#if defined(ASTRAI_HOST)
    if (call.num_ranges >= 0) {
        std::vector<host::MemoryRange> ranges;
        for (int i = 0; i < call.num_ranges; ++i) {
            const Range& range = call.ranges[i];
            ranges.push_back({range.address, range.num_bytes, range.is_writable != 0});
        }
        const host::MemoryScope scope(std::move(ranges));
        launch_named(call);
        return;
    }
#endif
    launch_named(call);
}

}  // namespace mini
}  // namespace astrai

// Runs a kernel; the text of what it raised, or nothing, goes to error.
extern "C" void mini_run(const astrai::mini::Call* call, char* error, size_t num_chars) {
    error[0] = 0;
    try {
        astrai::mini::run(*call);
    } catch (const std::exception& exception) {
        std::snprintf(error, num_chars, "%s", exception.what());
    }
}

#if defined(ASTRAI_HOST)

// Conversions of count elements: the 16-bit patterns of float32, and back.
extern "C" void mini_round(const float* x, uint16_t* bf16_bits, uint16_t* f16_bits, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        bf16_bits[i] = astrai::from_float<astrai::bf16>(x[i]).bits;
        f16_bits[i] = astrai::from_float<astrai::f16>(x[i]).bits;
    }
}
extern "C" void mini_widen(const uint16_t* bits, float* of_bf16, float* of_f16, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        of_bf16[i] = astrai::to_float(astrai::bf16{bits[i]});
        of_f16[i] = astrai::to_float(astrai::f16{bits[i]});
    }
}

#endif
