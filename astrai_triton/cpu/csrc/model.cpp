#include "model.h"

namespace astrai {

namespace {

std::vector<float> copy_padded(const float* source, int64_t count, int64_t padded) {
  std::vector<float> out;
  if (source) {
    out.assign(size_t(padded), 0.0f);
    std::copy(source, source + count, out.begin());
  }
  return out;
}

// Biases in the order of the packed columns.
std::vector<float> copy_bias(const float* source, const ColumnMap& map) {
  std::vector<float> out;
  if (source) {
    out.assign(size_t(round_up(map.columns(), kBlock)), 0.0f);
    for (int64_t c = 0; c < map.columns(); ++c) {
      if (map.source(c) >= 0) out[size_t(c)] = source[map.source(c)];
    }
  }
  return out;
}

void attach(Matrix& matrix, std::vector<float>& place, const float* source, const ColumnMap& map) {
  place = copy_bias(source, map);
  if (!place.empty()) matrix.bias = place.data();
}

}  // namespace

int64_t Model::weight_bytes() const {
  const AstraiShape& s = shape;
  const int64_t layer = matrix_bytes({dims.qkv_rows}, s.hidden) + matrix_bytes({s.hidden}, dims.q_dim) +
                        matrix_bytes({2 * s.inner, s.inner}, s.hidden) + matrix_bytes({s.hidden}, s.inner);
  return s.n_layers * layer + matrix_bytes({s.vocab}, s.hidden);
}

Matrix Model::pack_next(const void* source, int64_t depth, const ColumnMap& map) {
  uint8_t* place = weights_.base() + used_;
  used_ += matrix_bytes(map, depth);
  return pack(place, source, shape.dtype, depth, shape.weights, map, shape.threads);
}

void Model::pack_layer(int64_t i, const AstraiLayer& source) {
  const AstraiShape& s = shape;
  Layer& layer = layers[size_t(i)];
  const ColumnMap qkv{dims.qkv_rows}, hidden{s.hidden}, gate_up{2 * s.inner, s.inner};
  // In the order of a forward: memory is then read from one end to the other.
  layer.qkv = pack_next(source.qkv, s.hidden, qkv);
  layer.o = pack_next(source.o, dims.q_dim, hidden);
  layer.gate_up = pack_next(source.gate_up, s.hidden, gate_up);
  layer.down = pack_next(source.down, s.inner, hidden);
  attach(layer.qkv, layer.qkv_bias, source.qkv_bias, qkv);
  attach(layer.o, layer.o_bias, source.o_bias, hidden);
  attach(layer.gate_up, layer.gate_up_bias, source.gate_up_bias, gate_up);
  attach(layer.down, layer.down_bias, source.down_bias, hidden);
  layer.attn_norm = copy_padded(source.attn_norm, s.hidden, dims.residual_stride);
  layer.post_attn_norm = copy_padded(source.post_attn_norm, s.hidden, dims.residual_stride);
  layer.mlp_norm = copy_padded(source.mlp_norm, s.hidden, dims.residual_stride);
  layer.post_mlp_norm = copy_padded(source.post_mlp_norm, s.hidden, dims.residual_stride);
  const int64_t gains = (s.n_q_heads + s.n_kv_heads) * s.head_dim;
  layer.qk_gain = copy_padded(source.qk_gain, gains, gains);
  layer.sinks = copy_padded(source.sinks, s.n_q_heads, s.n_q_heads);
  layer.window = source.window;
  layer.rope = source.rope;
}

void Model::pack_head(const void* embed, const void* lm_head, const float* final_norm) {
  const AstraiShape& s = shape;
  head = pack_next(lm_head, s.hidden, {s.vocab});
  norm = copy_padded(final_norm, s.hidden, dims.residual_stride);
  if (has_embed_table(embed == lm_head)) {
    const uint8_t* bytes = static_cast<const uint8_t*>(embed);
    embed_.assign(bytes, bytes + s.vocab * s.hidden * (s.dtype == kF32 ? 4 : 2));
  }
}

void Model::read_embedding(float* out, int64_t token) const {
  const int64_t hidden = shape.hidden;
  if (embed_.empty()) {
    unpack_column(out, head, shape.weights, token, hidden);
  } else {
    for (int64_t k = 0; k < hidden; ++k) out[k] = read_value(embed_.data(), shape.dtype, token * hidden + k);
  }
  if (shape.embed_scale != 1.0f) {
    for (int64_t k = 0; k < hidden; ++k) out[k] *= shape.embed_scale;
  }
  std::fill(out + hidden, out + dims.residual_stride, 0.0f);
}

}  // namespace astrai
