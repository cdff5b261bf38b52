// The packed weights of a model, and the scratch of its forwards.
#pragma once

#include <memory>
#include <vector>

#include "arena.h"
#include "pack.h"
#include "team.h"

namespace astrai {

struct Layer {
  Matrix qkv, o, gate_up, down;
  std::vector<float> attn_norm, post_attn_norm, mlp_norm, post_mlp_norm;  // padded like the residual
  std::vector<float> qk_gain, sinks;                                      // empty without
  std::vector<float> qkv_bias, o_bias, gate_up_bias, down_bias;
  int64_t window = -1, rope = 0;
};

// Everything whose place follows from the shape.
struct Dims {
  explicit Dims(const AstraiShape& s)
      : q_dim(s.n_q_heads * s.head_dim),
        qkv_rows((s.n_q_heads + 2 * s.n_kv_heads) * s.head_dim),
        group(s.n_q_heads / s.n_kv_heads),
        residual_stride(round_up(s.hidden, kBlock)),
        qkv_stride(round_up(qkv_rows, kBlock)) {}

  int64_t q_dim, qkv_rows, group;
  int64_t residual_stride, qkv_stride;  // float32 elements
};

class Model {
 public:
  explicit Model(const AstraiShape& shape)
      : shape(shape), dims(shape), layers(size_t(shape.n_layers)), team(shape.threads), weights_(weight_bytes()) {}

  // Both are called once, layers in order, before any forward.
  void pack_layer(int64_t i, const AstraiLayer& source);
  void pack_head(const void* embed, const void* lm_head, const float* norm);

  // Row `token` of the embedding, [residual_stride] float32, scaled and padded with zeros.
  void read_embedding(float* out, int64_t token) const;

  int64_t num_bytes() const { return weights_.bytes(); }

  const AstraiShape shape;
  const Dims dims;
  std::vector<Layer> layers;
  Matrix head;
  std::vector<float> norm;
  Team team;
  Arena scratch;
  int64_t scratch_rows = 0;  // rows that scratch is laid out for

 private:
  bool has_embed_table(bool is_tied) const { return !is_tied || shape.weights >= kWeightsInt8; }
  int64_t matrix_bytes(const ColumnMap& map, int64_t depth) const {
    return round_up(map.columns(), kBlock) / kBlock * block_bytes(padded_depth(depth, shape.weights), shape.weights);
  }
  int64_t weight_bytes() const;
  Matrix pack_next(const void* source, int64_t depth, const ColumnMap& map);

  Arena weights_;
  int64_t used_ = 0;
  std::vector<uint8_t> embed_;  // [vocab, hidden] of shape.dtype; empty: the head has it
};

}  // namespace astrai
