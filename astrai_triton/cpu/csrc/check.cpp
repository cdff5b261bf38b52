// The library's check of itself: its kernels against plain loops in double. A process of its own runs it before the
// library is used for the first time, so that a wrong compiler or CPU shows there.

#include <cstdio>
#include <vector>

#include "kernels.h"
#include "arena.h"
#include "pack.h"

namespace astrai {

namespace {

// Numbers in [-1, 1), always the same.
class Noise {
 public:
  float next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return float(int32_t(state_ >> 32)) * 0x1p-31f;
  }

 private:
  uint64_t state_ = 1;
};

// Memory on whole lines, as kernels expect it.
template <class T>
class Lines {
 public:
  explicit Lines(int64_t count) : arena_(count * int64_t(sizeof(T))) {}
  T* data() { return reinterpret_cast<T*>(arena_.base()); }

 private:
  Arena arena_;
};

bool is_near(double got, double wanted, double tolerance, const char* what) {
  if (std::fabs(got - wanted) <= tolerance) return true;
  std::fprintf(stderr, "%s: wanted %g, got %g\n", what, wanted, got);
  return false;
}

template <class Kernel>
bool check_product(int rows, int64_t depth, const char* what) {
  using Act = typename Kernel::Act;
  constexpr int64_t kColumns = kBlock - 5;
  const int32_t dtype = Kernel::kWeights == kWeightsBf16 ? kBf16 : kF32;
  Noise noise;
  std::vector<float> weights(size_t(kColumns * depth));
  std::vector<bf16> halves(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    halves[i] = narrow(noise.next());
    weights[i] = widen(halves[i]);
  }
  const int64_t padded = padded_depth(depth, Kernel::kWeights), stride = row_stride(padded, sizeof(Act));
  Lines<uint8_t> block(block_bytes(padded, Kernel::kWeights));
  const void* source = dtype == kF32 ? static_cast<const void*>(weights.data()) : halves.data();
  const Matrix matrix = pack(block.data(), source, dtype, depth, Kernel::kWeights, {kColumns}, 1);
  Lines<Act> a(kTileRows * stride);
  for (int r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < depth; ++k) put(a.data() + r * stride + k, noise.next());
  }
  alignas(64) float tile[kTileRows * kBlock];
  Kernel::enter();
  Kernel::multiply(a.data(), stride, rows, matrix.block(0), padded, true, tile);
  Kernel::leave();
  for (int r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < kBlock; ++c) {
      double wanted = 0;
      for (int64_t k = 0; k < depth && c < kColumns; ++k) {
        wanted += double(widen(a.data()[r * stride + k])) * weights[size_t(c * depth + k)];
      }
      if (!is_near(tile[r * kBlock + c], wanted, 1e-4 * double(depth), what)) return false;
    }
  }
  return true;
}

// A multiple of 1/8 that quantisation to Bits keeps: every group holds the ends of the range, which fixes its scale.
template <int Bits>
float draw_weight(Noise& noise, int64_t k) {
  if (Bits == 8) return k % kGroup == 5 ? -127 * 0.125f : std::nearbyint(noise.next() * 126.0f) * 0.125f;
  const int64_t member = k % kFineGroup;
  const float q = member == 5 ? 0.0f : member == 9 ? 15.0f : std::nearbyint((noise.next() + 1.0f) * 7.5f);
  return (q - 5.0f) * 0.125f;
}

// Products of numbers that quantisation keeps exactly: only the order of sums may differ.
template <class Act, int Bits>
bool check_quantised(int rows, const char* what) {
  using Kernel = QuantKernel<Act, Bits>;
  constexpr int64_t kDepth = 3 * kGroup;
  Noise noise;
  std::vector<float> weights(size_t(kBlock * kDepth));
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = draw_weight<Bits>(noise, int64_t(i) % kDepth);
  Lines<uint8_t> block(block_bytes(kDepth, Kernel::kWeights));
  const Matrix matrix = pack(block.data(), weights.data(), kF32, kDepth, Kernel::kWeights, {kBlock}, 1);
  const int64_t stride = row_stride(kDepth, sizeof(Act)), bytes = row_stride(Kernel::row_bytes(kDepth), 1);
  Lines<Act> a(kTileRows * stride);
  Lines<uint8_t> quantised(kTileRows * bytes);
  for (int r = 0; r < rows; ++r) {
    Act* row = a.data() + r * stride;
    for (int64_t k = 0; k < kDepth; ++k) {
      put(row + k, k % kGroup == 5 ? 63.5f : std::nearbyint(noise.next() * 126.0f) * 0.5f);
    }
    Kernel::quantise(quantised.data() + r * bytes, row, kDepth);
  }
  const auto is_right = [&](const float* tile) {
    for (int i = 0; i < rows * kBlock; ++i) {
      double wanted = 0;
      for (int64_t k = 0; k < kDepth; ++k) {
        wanted += double(widen(a.data()[i / kBlock * stride + k])) * weights[size_t(i % kBlock * kDepth + k)];
      }
      if (!is_near(tile[i], wanted, 1e-5 * (1.0 + std::fabs(wanted)) * 127, what)) return false;
    }
    return true;
  };
  alignas(64) float tile[kTileRows * kBlock];
  Kernel::enter();
  Kernel::multiply(quantised.data(), bytes, rows, matrix.block(0), kDepth, true, tile);
  bool good = is_right(tile);
  if constexpr (Kernel::kWidens) {
    Lines<uint8_t> wide(block_bytes(kDepth, kWeightsBf16));
    Kernel::widen_block(wide.data(), matrix.block(0), kDepth);
    Bf16Kernel::multiply(a.data(), stride, rows, wide.data(), kDepth, true, tile);
    good = good && is_right(tile);
  }
  Kernel::leave();
  return good;
}

// Attention of one row by the kernel that a forward of this type takes.
template <class T>
void attend_one(float* parts, const float* q, const Keys<T>& cache, const Scoring& scoring, int64_t lo, int64_t hi,
                int64_t group, int64_t head_dim) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    AmxKernel::enter();
    attend_split_amx(parts, q, cache, scoring, lo, hi, group, head_dim);
    AmxKernel::leave();
    return;
  }
#endif
  attend_split(parts, q, cache, scoring, lo, hi, group, head_dim);
}

// Attention by the kernel that a forward of this type takes for several rows.
template <class T>
void attend_several(float* out, int64_t stride, const float* q, const Keys<T>& cache, const Scoring& scoring,
                    int64_t position, int64_t count, int64_t group, int64_t head_dim) {
  Lines<uint8_t> scratch(attend_rows_floats(head_dim) * 4 + kMaxRows * head_dim * 16);
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    Lines<bf16> rounded(count * stride);
    AmxKernel::enter();
    attend_rows_amx(rounded.data(), stride, q, stride, cache, scoring, position, count, group, head_dim, 0,
                    scratch.data());
    AmxKernel::leave();
    for (int64_t i = 0; i < count * stride; ++i) out[i] = widen(rounded.data()[i]);
    return;
  }
#endif
  attend_rows(out, stride, q, stride, cache, scoring, position, count, group, head_dim, 0,
              reinterpret_cast<float*>(scratch.data()));
}

// Attention of `count` rows at the end of `keys` keys, two query heads to the one key head, through a window that
// leaves some rows nothing of the first block of keys and others nothing of the last.
template <class T>
bool check_attention(int64_t head_dim, int64_t keys, int64_t count, double tolerance, const char* what) {
  constexpr int64_t kGroup = 2;
  Noise noise;
  std::vector<int32_t> slots(size_t(keys) + 16);
  // In order up to the last dozen, and that backwards.
  for (int64_t i = 0; i < keys; ++i) slots[size_t(i)] = int32_t(i < keys - 12 ? i : 2 * keys - 13 - i);
  slots[size_t(keys - 3)] = -1;
  Lines<T> k(keys * head_dim), v(keys * head_dim);
  Lines<float> q(count * kGroup * head_dim);
  for (int64_t i = 0; i < keys * head_dim; ++i) {
    put(k.data() + i, noise.next());
    put(v.data() + i, noise.next());
  }
  for (int64_t i = 0; i < count * kGroup * head_dim; ++i) q.data()[i] = noise.next();
  const Keys<T> cache{k.data(), v.data(), head_dim, slots.data()};
  constexpr int64_t kWindow = 30;
  const Scoring scoring{kLog2E / 8, 0.0f, nullptr, kWindow};
  Lines<float> out(count * kGroup * head_dim), parts(kGroup * part_stride(head_dim));
  const int64_t stride = kGroup * head_dim, position = keys - count;
  if (count == 1 && head_dim % 16 == 0) {
    attend_one(parts.data(), q.data(), cache, scoring, keys - kWindow, keys, kGroup, head_dim);
    for (int64_t h = 0; h < kGroup; ++h) {
      merge_splits(out.data() + h * head_dim, parts.data() + h * part_stride(head_dim), 1, 0, scoring, h, head_dim);
    }
  } else {
    attend_several(out.data(), stride, q.data(), cache, scoring, position, count, kGroup, head_dim);
  }
  for (int64_t r = 0; r < count * kGroup; ++r) {
    std::vector<double> sum(size_t(head_dim), 0.0);
    double total = 0;
    for (int64_t j = 0; j <= position + r / kGroup; ++j) {
      if (slots[size_t(j)] < 0 || j <= position + r / kGroup - kWindow) continue;
      const T* key = k.data() + slots[size_t(j)] * head_dim;
      const T* value = v.data() + slots[size_t(j)] * head_dim;
      double s = 0;
      for (int64_t d = 0; d < head_dim; ++d) s += double(q.data()[r * head_dim + d]) * widen(key[d]);
      const double weight = std::exp(s / 8);
      total += weight;
      for (int64_t d = 0; d < head_dim; ++d) sum[size_t(d)] += weight * widen(value[d]);
    }
    for (int64_t d = 0; d < head_dim; ++d) {
      if (!is_near(out.data()[r * head_dim + d], sum[size_t(d)] / total, tolerance, what)) return false;
    }
  }
  return true;
}

bool check_functions() {
  for (float x = -20.0f; x < 20.0f; x += 0.37f) {
    if (!is_near(exp2(splat(x))[0], std::exp2(double(x)), 3e-7 * std::exp2(double(x)), "exp2")) return false;
    if (!is_near(tanh(splat(x))[0], std::tanh(double(x)), 3e-7, "tanh")) return false;
    if (!is_near(silu(splat(x))[0], x / (1 + std::exp(-double(x))), 3e-6, "silu")) return false;
  }
  return is_near(exp2(splat(-INFINITY))[0], 0, 0, "exp2(-inf)") && is_near(silu(splat(-200.0f))[0], 0, 0, "silu(-200)");
}

}  // namespace

}  // namespace astrai

extern "C" {

int32_t astrai_prepare();
void astrai_weigh(const float*, int64_t, float, float, float*);
void astrai_sum_mass(const float*, int64_t, float, float, double*);
int64_t astrai_find_large(const float*, int64_t, float, int64_t*);
}

namespace astrai {

namespace {

bool check_sampling() {
  constexpr int64_t kCount = 256 + 37;
  constexpr float kTop = 2.0f, kScale = 3.0f, kBound = 0.5f;
  Noise noise;
  Lines<float> logits(kCount), mass(kCount);
  Lines<double> sums(2);
  Lines<int64_t> ids(kCount);
  for (int64_t i = 0; i < kCount; ++i) logits.data()[i] = i % 7 == 3 ? -INFINITY : 2.0f * noise.next();
  astrai_weigh(logits.data(), kCount, kTop, kScale, mass.data());
  astrai_sum_mass(logits.data(), kCount, kTop, kScale, sums.data());
  const int64_t num_large = astrai_find_large(logits.data(), kCount, kBound, ids.data());
  double wanted_sums[2] = {};
  int64_t num_wanted = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const double wanted = std::exp((double(logits.data()[i]) - kTop) * kScale) * 4294967296.0;
    if (!is_near(mass.data()[i], wanted, 2e-6 * wanted + 0.5, "mass")) return false;
    wanted_sums[i / 256] += mass.data()[i];
    if (logits.data()[i] < kBound) continue;
    if (!is_near(double(ids.data()[num_wanted++]), double(i), 0, "large logit")) return false;
  }
  return is_near(double(num_large), double(num_wanted), 0, "large logits") &&
         is_near(sums.data()[0], wanted_sums[0], 0, "sum of masses") &&
         is_near(sums.data()[1], wanted_sums[1], 0, "sum of masses of a part");
}

}  // namespace

}  // namespace astrai

extern "C" {

// 0 when every kernel of this build gives what it should on this CPU; says on stderr what does not.
int32_t astrai_check() {
  using namespace astrai;
  if (astrai_prepare() != 0) {
    std::fprintf(stderr, "the system refuses the tiles of AMX\n");
    return 1;
  }
  bool good = check_functions() && check_sampling();
  for (int rows : {1, 7, 17, 32}) {
    good = good && check_product<F32Kernel>(rows, 75, "float32 product");
    good = good && check_product<Bf16Kernel>(rows, 75, "bfloat16 product");
    good = good && check_quantised<float, 8>(rows, "int8 product") && check_quantised<bf16, 8>(rows, "int8 product");
    good = good && check_quantised<float, 4>(rows, "int4 product") && check_quantised<bf16, 4>(rows, "int4 product");
  }
  for (int64_t count : {1, 48}) {
    // Keys, and with them the result, are the same in both; only q and weights are rounded.
    good = good && check_attention<float>(64, 112, count, 1e-5, "float32 attention");
    good = good && check_attention<bf16>(64, 112, count, 1e-2, "bfloat16 attention");
    good = good && check_attention<float>(24, 112, count, 1e-5, "float32 attention of 24");
  }
  return good ? 0 : 1;
}
}
