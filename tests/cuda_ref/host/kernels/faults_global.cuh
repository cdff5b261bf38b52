// Kernels that keep the rules of global memory, or break one if is_broken; see faults_shared.cuh. x and out
// have 256 floats.
#pragma once

#include "faults_shared.cuh"

namespace astrai {
namespace mini {

ASTRAI_GLOBAL(64) read_past_the_end(Args args) {
    const float* source = args.x_as<float>() + (args.is_broken ? 195 : 192);
    keep(args, load_global(source + threadIdx.x));  // FAULT read_past_the_end
}

ASTRAI_GLOBAL(64) read_before_the_start(Args args) {
    const float* source = args.x_as<float>() - (args.is_broken ? 1 : 0);
    keep(args, load_global(source + threadIdx.x));  // FAULT read_before_the_start
}

ASTRAI_GLOBAL(64) read_across_the_end(Args args) {
    const Bytes16* wide = args.x_as<Bytes16>() + args.n - (args.is_broken ? 0 : 1);
    keep(args, static_cast<float>(load_global(wide - 1).word[0]));
    keep(args, static_cast<float>(load_global(wide).word[0]));  // FAULT read_across_the_end
}

ASTRAI_GLOBAL(64) read_at_null(Args args) {
    const float* source = args.is_broken ? nullptr : args.x_as<float>();
    keep(args, load_global(source));  // FAULT read_at_null
}

ASTRAI_GLOBAL(64) write_past_the_end(Args args) {
    float* target = args.out_as<float>() + (args.is_broken ? 193 : 192);
    store_global(target + threadIdx.x, 1.0f);  // FAULT write_past_the_end
}

ASTRAI_GLOBAL(64) write_to_read_only(Args args) {
    float* target = args.is_broken ? const_cast<float*>(args.x_as<float>()) : args.out_as<float>();
    const float x = load_global(target + 2);
    store_global(target + 2, x + 1.0f);  // FAULT write_to_read_only
}

ASTRAI_GLOBAL(64) read_misaligned(Args args) {
    const Bytes16* source = reinterpret_cast<const Bytes16*>(args.x_as<float>() + (args.is_broken ? 2 : 4));
    keep(args, static_cast<float>(load_global(source).word[0]));  // FAULT read_misaligned
}

ASTRAI_GLOBAL(64) write_misaligned(Args args) {
    unsigned char* target = args.out_as<unsigned char>() + (args.is_broken ? 6 : 8);
    store_global(reinterpret_cast<float*>(target), 1.0f);  // FAULT write_misaligned
}

}  // namespace mini
}  // namespace astrai
