// Prefill of a packed batch over K and V in a pool.
#include "csrc/kernels/attn_prefill_launch.cuh"

namespace astrai {

void attn_paged_prefill(const AttnParams& params, Dtype dtype, Variant variant, void* stream) {
    prefill::launch_variant<PackedQSchedule, PagedKV>(params, dtype, variant, params.num_q_tiles, stream);
}

}  // namespace astrai
