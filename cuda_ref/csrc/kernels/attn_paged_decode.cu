// Decode over K and V in a pool.
#include "csrc/kernels/attn_decode_launch.cuh"

namespace astrai {

void attn_paged_decode(const AttnParams& params, Dtype dtype, Variant variant, void* stream) {
    decode::run<PagedKV>(params, dtype, variant, stream);
}

}  // namespace astrai
