// What crosses the boundary to Python. Plain C; astrai_triton/cpu/abi.py mirrors it field by field.
#pragma once

#include <cstdint>

extern "C" {

// Of the weights of linear layers. The LM head has the same, with int4 it has int8.
enum AstraiWeights : int32_t { kWeightsF32 = 0, kWeightsBf16 = 1, kWeightsInt8 = 2, kWeightsInt4 = 3 };
enum AstraiDtype : int32_t { kF32 = 0, kBf16 = 1 };
enum AstraiActivation : int32_t { kSilu = 0, kGeluTanh = 1 };

// What not every model has; bits of AstraiShape::has.
enum AstraiHas : int32_t {
  kHasQkvBias = 1,
  kHasOutBias = 2,
  kHasMlpBias = 4,
  kHasPostNorms = 8,
  kHasQkGain = 16,
  kHasSinks = 32,
  kHasHead = 64,  // an LM head of its own, not the embedding
};

struct AstraiShape {
  int64_t n_layers, hidden, inner, n_q_heads, n_kv_heads, head_dim, rotary_dim, vocab, n_ropes;
  int32_t weights;     // AstraiWeights
  int32_t dtype;       // AstraiDtype, of the tensors given to pack, and of K and V
  int32_t activation;  // AstraiActivation
  int32_t adjacent;    // rotary pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
  int32_t threads;
  int32_t has;         // AstraiHas, added up
  float norm_eps, embed_scale, softmax_scale, attn_softcap, logit_softcap;
};

// Of one layer. Matrices are [out, in] row-major in `dtype`, all else float32; null where the shape has none.
struct AstraiLayer {
  const void *qkv, *o, *gate_up, *down;
  const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
  const float *attn_norm, *post_attn_norm, *mlp_norm, *post_mlp_norm;
  const float* qk_gain;  // [n_q_heads + n_kv_heads, head_dim]
  const float* sinks;    // [n_q_heads]
};

// One forward. T rows, B requests, R rows of logits. All index tensors are contiguous.
struct AstraiStep {
  int64_t num_rows, batch, num_logits;
  const int64_t *token_ids, *positions, *logits_rows;  // [T] [T] [R]
  const int32_t* req_to_token;                         // [num_reqs, max_ctx_len], rows table_stride apart
  int64_t num_reqs, max_ctx_len, table_stride;
  const int32_t *req_pool_indices, *seq_lens, *qo_indptr, *out_cache_loc;  // [B] [B] [B + 1] [T]
  void *k_buffer, *v_buffer;  // [n_layers, num_slots, n_kv_heads, head_dim] contiguous, `dtype`
  int64_t num_slots;
  const float* const* freqs_cis;   // [n_ropes] -> [num_positions, rotary_dim / 2, 2]
  const int64_t* num_positions;    // [n_ropes]
  float* logits;                   // [R, vocab] contiguous
  double* phase_seconds;           // [kNumPhases] added to, or null
};
}

namespace astrai {

enum Phase { kEmbed, kNorm, kQkv, kRotary, kAttend, kOut, kGateUp, kDown, kHead, kNumPhases };

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace astrai
