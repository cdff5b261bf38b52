// The packed weights of a model, and the scratch of its forwards.
#pragma once

#include <vector>

#include "arena.h"
#include "pack.h"
#include "team.h"

namespace astrai {

// Values in the arena of the weights; none where the model has none.
struct Floats {
  float* values = nullptr;

  bool empty() const { return values == nullptr; }
  float* data() { return values; }
  const float* data() const { return values; }
};

struct Layer {
  Matrix qkv, o, gate_up, down;
  Floats qkv_bias, o_bias, gate_up_bias, down_bias;               // in the order of the packed columns
  Floats attn_norm, post_attn_norm, mlp_norm, post_mlp_norm;      // padded like the residual
  Floats qk_gain, sinks;
  int64_t window = -1, rope = 0;
};

// Everything whose size follows from the shape.
struct Dims {
  explicit Dims(const AstraiShape& s)
      : q_dim(s.n_q_heads * s.head_dim),
        qkv_rows((s.n_q_heads + 2 * s.n_kv_heads) * s.head_dim),
        group(s.n_q_heads / s.n_kv_heads),
        residual_stride(round_up(s.hidden, kBlock)),
        qkv_stride(round_up(qkv_rows, kBlock)),
        qkv{qkv_rows},
        hidden{s.hidden},
        gate_up{2 * s.inner, s.inner},
        vocab{s.vocab} {}

  int64_t q_dim, qkv_rows, group;
  int64_t residual_stride, qkv_stride;    // float32 elements
  ColumnMap qkv, hidden, gate_up, vocab;  // of what has that many outputs
};

// Where everything lies follows from the shape alone, so that the arena's bytes are all there is to keep of a model:
// a second model of the same shape is the same once it has them.
class Model {
 public:
  // windows[n_layers]: keys a row sees, itself included, -1 is all. ropes[n_layers]: which table turns q and k.
  Model(const AstraiShape& shape, const int64_t* windows, const int64_t* ropes);

  // Both are called once, before any forward, unless somebody fills weights() instead.
  void pack_layer(int64_t i, const AstraiLayer& source);
  void pack_head(const void* embed, const void* lm_head, const float* norm);

  // Row `token` of the embedding, [residual_stride] float32, scaled and padded with zeros.
  void read_embedding(float* out, int64_t token) const;

  // Everything packed: [weight_bytes()].
  uint8_t* weights() { return weights_.base(); }
  int64_t weight_bytes() const { return used_; }
  // What every forward reads of it: all but a table of embeddings.
  int64_t streamed_bytes() const { return streamed_; }

  const AstraiShape shape;
  const Dims dims;
  std::vector<Layer> layers;
  Matrix head;
  Floats norm;
  Team team;
  Arena scratch;
  int64_t scratch_rows = 0;  // rows that scratch is laid out for

 private:
  void place_all();
  uint8_t* place(int64_t bytes);
  Matrix place_matrix(int64_t depth, const ColumnMap& map, int32_t weights);
  Floats place_floats(int64_t count, bool is_there = true);
  Floats place_bias(Matrix& matrix, const ColumnMap& map, int32_t which);
  void pack_matrix(const Matrix& matrix, const void* source, int64_t depth, const ColumnMap& map, int32_t weights);

  int64_t embed_bytes() const { return shape.vocab * shape.hidden * (shape.dtype == kF32 ? 4 : 2); }

  Arena weights_;
  int64_t used_ = 0, streamed_ = 0;
  uint8_t* embed_ = nullptr;  // [vocab, hidden] of shape.dtype; null: the head has it
};

}  // namespace astrai
