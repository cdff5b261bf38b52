#include "model.h"

#include <cstring>

namespace astrai {

namespace {

void fill(Floats& out, const float* source, int64_t count) {
  if (!out.empty()) std::copy(source, source + count, out.data());
}

void fill_bias(Floats& out, const float* source, const ColumnMap& map) {
  if (out.empty()) return;
  for (int64_t c = 0; c < map.columns(); ++c) {
    if (map.source(c) >= 0) out.data()[c] = source[map.source(c)];
  }
}

}  // namespace

Model::Model(const AstraiShape& given, const int64_t* windows, const int64_t* ropes)
    : shape(given), dims(given), layers(size_t(given.n_layers)), team(given.threads) {
  // Once to count.
  place_all();
  weights_ = Arena(used_);
  place_all();
  for (int64_t i = 0; i < shape.n_layers; ++i) {
    layers[size_t(i)].window = windows[i];
    layers[size_t(i)].rope = ropes[i];
  }
}

// Matrices in the order of a forward: memory is then read from one end to the other. What is small lies behind them.
void Model::place_all() {
  const AstraiShape& s = shape;
  used_ = 0;
  for (Layer& layer : layers) {
    layer.qkv = place_matrix(s.hidden, dims.qkv, s.weights);
    layer.o = place_matrix(dims.q_dim, dims.hidden, s.weights);
    layer.gate_up = place_matrix(s.hidden, dims.gate_up, s.weights);
    layer.down = place_matrix(s.inner, dims.hidden, s.weights);
  }
  head = place_matrix(s.hidden, dims.vocab, head_weights(s.weights));
  for (Layer& layer : layers) {
    layer.qkv_bias = place_bias(layer.qkv, dims.qkv, kHasQkvBias);
    layer.o_bias = place_bias(layer.o, dims.hidden, kHasOutBias);
    layer.gate_up_bias = place_bias(layer.gate_up, dims.gate_up, kHasMlpBias);
    layer.down_bias = place_bias(layer.down, dims.hidden, kHasMlpBias);
    layer.attn_norm = place_floats(dims.residual_stride);
    layer.post_attn_norm = place_floats(dims.residual_stride, s.has & kHasPostNorms);
    layer.mlp_norm = place_floats(dims.residual_stride);
    layer.post_mlp_norm = place_floats(dims.residual_stride, s.has & kHasPostNorms);
    layer.qk_gain = place_floats((s.n_q_heads + s.n_kv_heads) * s.head_dim, s.has & kHasQkGain);
    layer.sinks = place_floats(s.n_q_heads, s.has & kHasSinks);
  }
  norm = place_floats(dims.residual_stride);
  streamed_ = used_;
  // Quantised columns are no embedding.
  const bool has_table = (s.has & kHasHead) || s.weights >= kWeightsInt8;
  embed_ = has_table ? place(embed_bytes()) : nullptr;
}

uint8_t* Model::place(int64_t bytes) {
  uint8_t* at = weights_.base() + used_;
  used_ += round_up(bytes, 64);
  return at;
}

Matrix Model::place_matrix(int64_t depth, const ColumnMap& map, int32_t weights) {
  Matrix matrix;
  matrix.columns = map.columns();
  matrix.depth = padded_depth(depth, weights);
  matrix.block_bytes = block_bytes(matrix.depth, weights);
  matrix.data = place(matrix.num_blocks() * matrix.block_bytes);
  return matrix;
}

Floats Model::place_floats(int64_t count, bool is_there) {
  if (!is_there) return {};
  return {reinterpret_cast<float*>(place(count * 4))};
}

Floats Model::place_bias(Matrix& matrix, const ColumnMap& map, int32_t which) {
  const Floats bias = place_floats(round_up(map.columns(), kBlock), shape.has & which);
  matrix.bias = bias.data();
  return bias;
}

void Model::pack_matrix(const Matrix& matrix, const void* source, int64_t depth, const ColumnMap& map,
                        int32_t weights) {
  uint8_t* data = weights_.base() + (matrix.data - weights_.base());
  pack(data, source, shape.dtype, depth, weights, map, shape.threads);
}

void Model::pack_layer(int64_t i, const AstraiLayer& source) {
  const AstraiShape& s = shape;
  Layer& layer = layers[size_t(i)];
  pack_matrix(layer.qkv, source.qkv, s.hidden, dims.qkv, s.weights);
  pack_matrix(layer.o, source.o, dims.q_dim, dims.hidden, s.weights);
  pack_matrix(layer.gate_up, source.gate_up, s.hidden, dims.gate_up, s.weights);
  pack_matrix(layer.down, source.down, s.inner, dims.hidden, s.weights);
  fill_bias(layer.qkv_bias, source.qkv_bias, dims.qkv);
  fill_bias(layer.o_bias, source.o_bias, dims.hidden);
  fill_bias(layer.gate_up_bias, source.gate_up_bias, dims.gate_up);
  fill_bias(layer.down_bias, source.down_bias, dims.hidden);
  fill(layer.attn_norm, source.attn_norm, s.hidden);
  fill(layer.post_attn_norm, source.post_attn_norm, s.hidden);
  fill(layer.mlp_norm, source.mlp_norm, s.hidden);
  fill(layer.post_mlp_norm, source.post_mlp_norm, s.hidden);
  fill(layer.qk_gain, source.qk_gain, (s.n_q_heads + s.n_kv_heads) * s.head_dim);
  fill(layer.sinks, source.sinks, s.n_q_heads);
}

void Model::pack_head(const void* embed, const void* lm_head, const float* final_norm) {
  pack_matrix(head, lm_head, shape.hidden, dims.vocab, head_weights(shape.weights));
  fill(norm, final_norm, shape.hidden);
  if (embed_) std::memcpy(embed_, embed, size_t(embed_bytes()));
}

void Model::read_embedding(float* out, int64_t token) const {
  const int64_t hidden = shape.hidden;
  if (embed_) {
    for (int64_t k = 0; k < hidden; ++k) out[k] = read_value(embed_, shape.dtype, token * hidden + k);
  } else {
    unpack_column(out, head, shape.weights, token, hidden);
  }
  if (shape.embed_scale != 1.0f) {
    for (int64_t k = 0; k < hidden; ++k) out[k] *= shape.embed_scale;
  }
  std::fill(out + hidden, out + dims.residual_stride, 0.0f);
}

}  // namespace astrai
