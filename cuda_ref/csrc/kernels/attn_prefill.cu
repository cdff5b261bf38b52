// Prefill over contiguous K and V.
#include "csrc/kernels/attn_prefill_launch.cuh"

namespace astrai {

void attn_prefill(const AttnParams& params, Dtype dtype, Variant variant, void* stream) {
    const int64_t tiles_of_request = (static_cast<int64_t>(params.q_len) + Q_TILE - 1) / Q_TILE;
    prefill::launch_variant<DenseQSchedule, ContigKV>(params, dtype, variant, tiles_of_request * params.batch,
                                                      stream);
}

}  // namespace astrai
