#include "forward.h"

#include "blocks.h"
#include "clock.h"
#include "kernels.h"
#include "plan.h"
#include "row_runs.h"
#include "rows.h"
#include "scratch.h"

namespace astrai {

namespace {

template <class Kernel>
constexpr bool widens() {
  if constexpr (Kernel::kQuantises) return Kernel::kWidens;
  return false;
}

template <class Kernel, class T>
class Forward {
  using Act = typename Kernel::Act;
  static constexpr bool kWidens = widens<Kernel>();

 public:
  Forward(Model& model, const AstraiStep& step)
      : model_(model),
        step_(step),
        shape_(model.shape),
        dims_(model.dims),
        plan_(step, model.dims.group, model.shape.head_dim % 16 == 0),
        runs_(step) {
    const int64_t rows = std::max(step.num_rows, step.num_logits);
    if (rows > model.scratch_rows || measure(model.scratch_rows) > model.scratch.bytes()) {
      const int64_t capacity = std::max(model.scratch_rows, round_up(rows + rows / 4, kTileRows));
      const int64_t bytes = measure(capacity);
      model.scratch_rows = 0;
      model.scratch = Arena();
      model.scratch = Arena(bytes + bytes / 4);
      model.scratch_rows = capacity;
    }
    Cutter cutter{model.scratch.base()};
    cut(cutter, model.scratch_rows);
  }

  void run() {
#pragma omp parallel num_threads(shape_.threads)
    {
#pragma omp single
      model_.team.begin(omp_get_num_threads());
      Kernel::enter();
      Worker worker(model_.team, omp_get_thread_num());
      run_phases(worker);
      Kernel::leave();
    }
  }

 private:
  int64_t measure(int64_t capacity) {
    Cutter counter{nullptr};
    cut(counter, capacity);
    return counter.used;
  }

  // What has one length per row comes first and depends on the capacity alone: its padding of columns, which is
  // zero and must stay so, never lies where another step had something else.
  void cut(Cutter& cutter, int64_t rows) {
    const auto act_stride = [&](int64_t depth) {
      return row_stride(padded_depth(depth, shape_.weights), int64_t(sizeof(Act)));
    };
    s_.residual = cutter.take_rows<float>(rows, dims_.residual_stride);
    s_.qkv = cutter.take_rows<float>(rows, dims_.qkv_stride);
    s_.out = cutter.take_rows<float>(rows, dims_.residual_stride);
    s_.hidden = cutter.take_rows<Act>(rows, act_stride(shape_.hidden));
    s_.attended = cutter.take_rows<Act>(rows, act_stride(dims_.q_dim));
    s_.inner = cutter.take_rows<Act>(rows, act_stride(round_up(shape_.inner, kHalf)));
    if constexpr (Kernel::kQuantises) {
      s_.quantised = cutter.take_rows<uint8_t>(rows, row_stride(Kernel::row_bytes(deepest_row()), 1));
    }
    s_.parts = cutter.take<float>(plan_.num_parts * shape_.n_q_heads * part_stride(shape_.head_dim));
    int64_t bytes = attend_rows_floats(shape_.head_dim) * 4;
#if defined(__AMX_BF16__)
    bytes = std::max(bytes, attend_rows_amx_bytes(shape_.head_dim));
#endif
    if constexpr (kWidens) bytes = std::max(bytes, deepest_row() * kBlock * 2);
    s_.thread_bytes = round_up(bytes, 4096) + 128;
    s_.threads = cutter.take<uint8_t>(s_.thread_bytes * shape_.threads);
  }

  // K of the deepest matrix, padded.
  int64_t deepest_row() const {
    return padded_depth(std::max({shape_.hidden, dims_.q_dim, round_up(shape_.inner, kHalf)}), shape_.weights);
  }

  void run_phases(Worker& worker) {
    Clock clock(worker.id() == 0 ? step_.phase_seconds : nullptr);
    for_rows(worker, step_.num_rows, [&](int64_t t) { model_.read_embedding(s_.residual.row(t), step_.token_ids[t]); });
    clock.lap(kEmbed);
    for (int64_t i = 0; i < shape_.n_layers; ++i) {
      const Layer& layer = model_.layers[size_t(i)];
      norm_rows(worker, layer.attn_norm);
      clock.lap(kNorm);
      linear(worker, layer.qkv, s_.hidden, step_.num_rows,
             [&](const float* tile, int64_t row, int count, int64_t block) {
               keep(s_.qkv, layer.qkv, tile, row, count, block);
             });
      clock.lap(kQkv);
      for_rows(worker, step_.num_rows, [&](int64_t t) { rotate_row(layer, i, t); });
      clock.lap(kRotary);
      attend(worker, layer, i);
      clock.lap(kAttend);
      add_linear(worker, layer.o, s_.attended, layer.post_attn_norm);
      clock.lap(kOut);
      norm_rows(worker, layer.mlp_norm);
      clock.lap(kNorm);
      linear(worker, layer.gate_up, s_.hidden, step_.num_rows,
             [&](const float* tile, int64_t row, int count, int64_t block) {
               activate(layer.gate_up, tile, row, count, block);
             });
      clock.lap(kGateUp);
      add_linear(worker, layer.down, s_.inner, layer.post_mlp_norm);
      clock.lap(kDown);
    }
    for_rows(worker, step_.num_logits, [&](int64_t r) {
      norm_row(s_.hidden.row(r), s_.residual.row(step_.logits_rows[r]), model_.norm.data(), dims_.residual_stride,
               shape_.hidden, shape_.norm_eps);
    });
    multiply_head(worker);
    clock.lap(kHead);
  }

  // rows = a * matrix, in tiles of 32 x 32; `use` gets each of them, with its first row, row count and block.
  //
  // As many rows as the second cache holds stay there while the blocks of the matrix go by, each of them read from
  // memory once; fewer where there are more threads than work.
  template <class Use>
  void linear(Worker& worker, const Matrix& matrix, const Rows<Act>& a, int64_t rows, Use&& use) {
    if constexpr (!Kernel::kQuantises) {
      multiply<Kernel>(worker, matrix, a, rows, use);
    } else if (kWidens && runs_.any(false)) {
      multiply_runs(worker, matrix, a, rows, use);
    } else {
      multiply_quantised<Kernel>(worker, matrix, a, rows, use);
    }
  }

  void multiply_head(Worker& worker) {
    const auto use = [&](const float* tile, int64_t row, int count, int64_t block) {
      keep_logits(tile, row, count, block);
    };
    if constexpr (Kernel::kQuantises) {
      multiply_quantised<typename Kernel::Head>(worker, model_.head, s_.hidden, step_.num_logits, use);
    } else {
      multiply<Kernel>(worker, model_.head, s_.hidden, step_.num_logits, use);
    }
  }

  template <class K, class Use>
  void multiply_quantised(Worker& worker, const Matrix& matrix, const Rows<Act>& a, int64_t rows, Use&& use) {
    for_rows(worker, rows, [&](int64_t t) { K::quantise(s_.quantised.row(t), a.row(t), matrix.depth); });
    multiply<K>(worker, matrix, s_.quantised, rows, use);
  }

  template <class K, class Operand, class Use>
  void multiply(Worker& worker, const Matrix& matrix, const Rows<Operand>& a, int64_t rows, Use&& use) {
    const int64_t row_bytes = a.stride * int64_t(sizeof(Operand));
    for_blocks(worker, matrix, rows, row_bytes, kTileRows, [&](int64_t first, int64_t last, int64_t block) {
      alignas(64) float tile[kTileRows * kBlock];
      for (int64_t row = first; row < last; row += kTileRows) {
        const int count = int(std::min<int64_t>(kTileRows, last - row));
        K::multiply(a.row(row), a.stride, count, matrix.block(block), matrix.depth, row == first, tile);
        use(tile, row, count, block);
      }
    });
  }

  // Rows that decode multiply as ever; those of a prefill are not quantised, their weights are widened instead. That
  // takes some 300 cycles for what 32 rows multiply in 128, so that it wants some hundred rows to be worth it.
  template <class Use>
  void multiply_runs(Worker& worker, const Matrix& matrix, const Rows<Act>& a, int64_t rows, Use&& use) {
    if constexpr (kWidens) {
      if (runs_.any(true)) {
        for_rows(worker, rows, [&](int64_t t) {
          if (runs_.find(t).decodes) Kernel::quantise(s_.quantised.row(t), a.row(t), matrix.depth);
        });
      }
      const int64_t row_bytes = a.stride * int64_t(sizeof(Act));
      for_blocks(worker, matrix, rows, row_bytes, 256, [&](int64_t first, int64_t last, int64_t block) {
        alignas(64) float tile[kTileRows * kBlock];
        uint8_t* wide = s_.threads + worker.id() * s_.thread_bytes;
        bool is_wide = false;
        for (int64_t row = first; row < last;) {
          const RowRuns::Run& run = runs_.find(row);
          const int count = int(std::min<int64_t>({kTileRows, last - row, run.end - row}));
          if (run.decodes) {
            Kernel::multiply(s_.quantised.row(row), s_.quantised.stride, count, matrix.block(block), matrix.depth,
                             row == first, tile);
          } else {
            if (!is_wide) Kernel::widen_block(wide, matrix.block(block), matrix.depth);
            is_wide = true;
            Bf16Kernel::multiply(a.row(row), a.stride, count, wide, matrix.depth, false, tile);
          }
          use(tile, row, count, block);
          row += count;
        }
      });
    }
  }

  static vf with_bias(const float* tile, const float* bias, int64_t column) {
    return bias ? load(tile) + load(bias + column) : load(tile);
  }

  static void keep(const Rows<float>& rows, const Matrix& matrix, const float* tile, int64_t row, int count,
                   int64_t block) {
    for (int r = 0; r < count; ++r) {
      float* out = rows.row(row + r) + block * kBlock;
      for (int c = 0; c < kBlock; c += kWidth) {
        store(out + c, with_bias(tile + r * kBlock + c, matrix.bias, block * kBlock + c));
      }
    }
  }

  // residual += a * matrix, normed first if there is a gain.
  void add_linear(Worker& worker, const Matrix& matrix, const Rows<Act>& a, const Floats& gain) {
    if (gain.empty()) {
      linear(worker, matrix, a, step_.num_rows, [&](const float* tile, int64_t row, int count, int64_t block) {
        for (int r = 0; r < count; ++r) {
          float* out = s_.residual.row(row + r) + block * kBlock;
          for (int c = 0; c < kBlock; c += kWidth) {
            store(out + c, load(out + c) + with_bias(tile + r * kBlock + c, matrix.bias, block * kBlock + c));
          }
        }
      });
      return;
    }
    linear(worker, matrix, a, step_.num_rows, [&](const float* tile, int64_t row, int count, int64_t block) {
      keep(s_.out, matrix, tile, row, count, block);
    });
    for_rows(worker, step_.num_rows, [&](int64_t t) {
      add_normed_row(s_.residual.row(t), s_.out.row(t), gain.data(), dims_.residual_stride, shape_.hidden,
                     shape_.norm_eps);
    });
  }

  // A block holds 16 gates and their 16 ups.
  void activate(const Matrix& matrix, const float* tile, int64_t row, int count, int64_t block) {
    for (int r = 0; r < count; ++r) {
      const float* from = tile + r * kBlock;
      Act* out = s_.inner.row(row + r) + block * kHalf;
      for (int c = 0; c < kHalf; c += kWidth) {
        const vf gate = with_bias(from + c, matrix.bias, block * kBlock + c);
        const vf up = with_bias(from + kHalf + c, matrix.bias, block * kBlock + kHalf + c);
        store(out + c, (shape_.activation == kSilu ? silu(gate) : gelu_tanh(gate)) * up);
      }
    }
  }

  void keep_logits(const float* tile, int64_t row, int count, int64_t block) {
    const int64_t columns = std::min<int64_t>(kBlock, shape_.vocab - block * kBlock);
    const float cap = shape_.logit_softcap;
    for (int r = 0; r < count; ++r) {
      alignas(64) float line[kBlock];
      for (int c = 0; c < kBlock; c += kWidth) {
        const vf x = load(tile + r * kBlock + c);
        store(line + c, cap == 0.0f ? x : tanh(x / cap) * cap);
      }
      std::memcpy(step_.logits + (row + r) * shape_.vocab + block * kBlock, line, size_t(columns) * 4);
    }
  }

  void norm_rows(Worker& worker, const Floats& gain) {
    for_rows(worker, step_.num_rows, [&](int64_t t) {
      norm_row(s_.hidden.row(t), s_.residual.row(t), gain.data(), dims_.residual_stride, shape_.hidden,
               shape_.norm_eps);
    });
  }

  T* cache_of(void* buffer, int64_t layer) const {
    return static_cast<T*>(buffer) + layer * step_.num_slots * shape_.n_kv_heads * shape_.head_dim;
  }

  // Norms heads, turns q and k in place, and writes k and v to the cache.
  void rotate_row(const Layer& layer, int64_t layer_idx, int64_t t) {
    const int64_t dim = shape_.head_dim, turned = shape_.n_q_heads + shape_.n_kv_heads;
    Turn turn;
    turn.set(step_.freqs_cis[layer.rope] + step_.positions[t] * shape_.rotary_dim, shape_.rotary_dim, shape_.adjacent);
    float* heads = s_.qkv.row(t);
    for (int64_t head = 0; head < turned; ++head) {
      float* x = heads + head * dim;
      if (!layer.qk_gain.empty()) norm_head(x, layer.qk_gain.data() + head * dim, dim, shape_.norm_eps);
      turn.rotate(x);
    }
    const int64_t slot = step_.out_cache_loc[t], width = shape_.n_kv_heads * dim;
    if (slot < 0) return;
    convert_row(cache_of(step_.k_buffer, layer_idx) + slot * width, heads + shape_.n_q_heads * dim, width);
    convert_row(cache_of(step_.v_buffer, layer_idx) + slot * width, heads + turned * dim, width);
  }

  void attend(Worker& worker, const Layer& layer, int64_t layer_idx) {
    const int64_t kv_heads = shape_.n_kv_heads, dim = shape_.head_dim, group = dims_.group;
    const float cap = shape_.attn_softcap;
    const Scoring scoring{cap == 0.0f ? shape_.softmax_scale * kLog2E : shape_.softmax_scale, cap,
                          layer.sinks.empty() ? nullptr : layer.sinks.data(), layer.window};
    const int64_t split_stride = shape_.n_q_heads * part_stride(dim);
    worker.for_each(int64_t(plan_.pieces.size()) * kv_heads, [&](int64_t item) {
      const AttendPiece& piece = plan_.pieces[size_t(item / kv_heads)];
      const int64_t kv_head = item % kv_heads, head = kv_head * group;
      const Keys<T> keys{cache_of(step_.k_buffer, layer_idx) + kv_head * dim,
                         cache_of(step_.v_buffer, layer_idx) + kv_head * dim, kv_heads * dim, piece.slots};
      const float* q = s_.qkv.row(piece.row) + head * dim;
      if (piece.split < 0) {
        attend_block(worker, piece, keys, scoring, q, head);
        return;
      }
      const int64_t lo = std::max(piece.split * kSplitKeys, scoring.first_key(piece.position));
      const int64_t hi = std::min((piece.split + 1) * kSplitKeys, piece.position + 1);
      float* parts = s_.parts + (piece.part + piece.split) * split_stride + head * part_stride(dim);
      attend_keys(parts, q, keys, scoring, std::min(lo, hi), hi);
      if (piece.num_splits == 1) merge(piece, scoring, head, group);
    });
    if (plan_.split_rows.empty()) return;
    worker.for_each(int64_t(plan_.split_rows.size()), [&](int64_t i) {
      merge(plan_.pieces[size_t(plan_.split_rows[size_t(i)])], scoring, 0, shape_.n_q_heads);
    });
  }

  // What a decoding row makes of its keys [lo, hi).
  void attend_keys(float* parts, const float* q, const Keys<T>& keys, const Scoring& scoring, int64_t lo,
                   int64_t hi) const {
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, bf16>) {
      if (shape_.head_dim % 32 == 0) {
        return attend_split_amx(parts, q, keys, scoring, lo, hi, dims_.group, shape_.head_dim);
      }
    }
#endif
    attend_split(parts, q, keys, scoring, lo, hi, dims_.group, shape_.head_dim);
  }

  void merge(const AttendPiece& piece, const Scoring& scoring, int64_t head, int64_t count) {
    const int64_t dim = shape_.head_dim, stride = part_stride(dim), split_stride = shape_.n_q_heads * stride;
    for (int64_t h = head; h < head + count; ++h) {
      merge_splits(s_.attended.row(piece.row) + h * dim, s_.parts + piece.part * split_stride + h * stride,
                   piece.num_splits, split_stride, scoring, h, dim);
    }
  }

  void attend_block(Worker& worker, const AttendPiece& piece, const Keys<T>& keys, const Scoring& scoring,
                    const float* q, int64_t head) {
    Act* out = s_.attended.row(piece.row) + head * shape_.head_dim;
    uint8_t* scratch = s_.threads + worker.id() * s_.thread_bytes;
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, bf16> && std::is_same_v<Act, bf16>) {
      if (shape_.head_dim % 32 == 0) {
        attend_rows_amx(out, s_.attended.stride, q, s_.qkv.stride, keys, scoring, piece.position, piece.count,
                        dims_.group, shape_.head_dim, head, scratch);
        return;
      }
    }
#endif
    attend_rows(out, s_.attended.stride, q, s_.qkv.stride, keys, scoring, piece.position, piece.count, dims_.group,
                shape_.head_dim, head, reinterpret_cast<float*>(scratch));
  }

  Model& model_;
  const AstraiStep& step_;
  const AstraiShape& shape_;
  const Dims& dims_;
  const AttendPlan plan_;
  const RowRuns runs_;
  Scratch<Act> s_;
};

}  // namespace

void forward(Model& model, const AstraiStep& step) {
  const bool is_f32 = model.shape.dtype == kF32;
  switch (model.shape.weights) {
    case kWeightsF32: return Forward<F32Kernel, float>(model, step).run();
    case kWeightsBf16: return Forward<Bf16Kernel, bf16>(model, step).run();
    case kWeightsInt8:
      if (is_f32) return Forward<QuantKernel<float, 8>, float>(model, step).run();
      return Forward<QuantKernel<bf16, 8>, bf16>(model, step).run();
    default:
      if (is_f32) return Forward<QuantKernel<float, 4>, float>(model, step).run();
      return Forward<QuantKernel<bf16, 4>, bf16>(model, step).run();
  }
}

}  // namespace astrai
