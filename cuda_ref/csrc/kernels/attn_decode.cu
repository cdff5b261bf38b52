// Decode over contiguous K and V, and the number of splits of every decode.
#include "csrc/kernels/attn_decode_launch.cuh"

namespace astrai {

int count_decode_splits(const AttnParams& params, Dtype dtype) {
    decode::check_shape(params);
    return decode::count_splits(params, decode::choose_split_len(params.q_heads, params.kv_heads, dtype));
}

void attn_decode(const AttnParams& params, Dtype dtype, Variant variant, void* stream) {
    decode::run<ContigKV>(params, dtype, variant, stream);
}

}  // namespace astrai
