// What the standalone tests share: device memory, seeded and poisoned tensors, float64 attention, a table of
// results.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "csrc/kernels/attn_common.h"
#include "csrc/kernels/device.cuh"
#include "csrc/tests/device_buffer.cuh"

namespace astrai {
namespace test {

#if defined(ASTRAI_HOST)
template <class T>
T round_to(float x) {
    return from_float<T>(x);
}
template <class T>
float widen(T x) {
    return to_float(x);
}
#else
template <class T>
T round_to(float x);
template <>
inline float round_to<float>(float x) {
    return x;
}
template <>
inline f16 round_to<f16>(float x) {
    return __float2half_rn(x);
}
template <>
inline bf16 round_to<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
inline float widen(float x) { return x; }
inline float widen(f16 x) { return __half2float(x); }
inline float widen(bf16 x) { return __bfloat162float(x); }
#endif

template <class T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
    static constexpr Dtype value = Dtype::f32;
    static constexpr const char* name = "f32";
    // Relative to the largest value there can be; scores and sums are float32 in every dtype.
    static constexpr double tolerance = 2e-6;
};
template <>
struct DtypeOf<f16> {
    static constexpr Dtype value = Dtype::f16;
    static constexpr const char* name = "f16";
    // Half an ulp of the output, and the same of the probabilities where tensor cores multiply them.
    static constexpr double tolerance = 6e-4;
};
template <>
struct DtypeOf<bf16> {
    static constexpr Dtype value = Dtype::bf16;
    static constexpr const char* name = "bf16";
    static constexpr double tolerance = 5e-3;
};
// Scores and their sum are float32 whatever the dtype.
constexpr double LSE_TOLERANCE = 1e-5;

inline const char* name_of(Variant variant) { return variant == Variant::mma ? "mma" : "scalar"; }

constexpr float POISON = std::numeric_limits<float>::quiet_NaN();

// [batch, tokens, heads, dim] in row-major order with gap elements after each row of dim. Everything is NaN
// until it is set. gap a multiple of 8 keeps rows aligned to 16 bytes.
template <class T>
struct Tensor {
    int batch, tokens, heads, dim;
    int64_t stride_b, stride_t, stride_h;
    std::vector<T> elements;

    Tensor(int batch, int tokens, int heads, int dim, int gap = 0)
        : batch(batch), tokens(tokens), heads(heads), dim(dim),
          stride_b(static_cast<int64_t>(tokens) * heads * (dim + gap)),
          stride_t(static_cast<int64_t>(heads) * (dim + gap)), stride_h(dim + gap),
          elements(batch * stride_b, round_to<T>(POISON)) {}

    int64_t index(int b, int t, int h) const { return b * stride_b + t * stride_t + h * stride_h; }
    T* row(int b, int t, int h) { return elements.data() + index(b, t, h); }

    // The row as float32.
    std::vector<float> read(int b, int t, int h) const {
        std::vector<float> values(dim);
        for (int d = 0; d < dim; ++d) {
            values[d] = widen(elements[index(b, t, h) + d]);
        }
        return values;
    }
};

// Seeded, the same on every platform.
class Random {
public:
    explicit Random(uint32_t seed) : engine_(seed) {}

    int below(int count) { return static_cast<int>(engine_() % static_cast<uint32_t>(count)); }
    // In [-1, 1).
    float uniform() { return static_cast<float>(engine_() >> 8) * (2.0f / (1 << 24)) - 1.0f; }

    // Values in [-range, range).
    template <class T>
    void fill_row(Tensor<T>& tensor, int b, int t, int h, float range = 1.0f) {
        for (int d = 0; d < tensor.dim; ++d) {
            tensor.row(b, t, h)[d] = round_to<T>(range * uniform());
        }
    }
    template <class T>
    void fill(Tensor<T>& tensor, float range = 1.0f) {
        for (int b = 0; b < tensor.batch; ++b) {
            for (int t = 0; t < tensor.tokens; ++t) {
                for (int h = 0; h < tensor.heads; ++h) {
                    fill_row(tensor, b, t, h, range);
                }
            }
        }
    }
    // A permutation of 0 ... count - 1.
    std::vector<int> shuffled(int count) {
        std::vector<int> order(count);
        for (int i = 0; i < count; ++i) {
            const int other = below(i + 1);
            order[i] = order[other];
            order[other] = i;
        }
        return order;
    }

private:
    std::mt19937 engine_;
};

// A key that a row sees.
struct Key {
    std::vector<float> k, v;
};

struct Row {
    std::vector<double> out;
    double lse;
};

struct ScoreRule {
    double scale = 1.0;
    double softcap = 0.0;
    const float* sink = nullptr;  // of the head; null is none
};

// Whether a row at a position of its request sees the key at another.
inline bool is_in_window(int row, int key, int window_left, int window_right) {
    return key >= static_cast<int64_t>(row) - window_left && key <= static_cast<int64_t>(row) + window_right;
}

// One row of attention as the contract words it: no row of keys and no sink gives 0 and an lse of -inf.
inline Row attend(const std::vector<float>& q, const std::vector<Key>& keys, int value_dim,
                  const ScoreRule& rule) {
    std::vector<double> scores;
    double highest = rule.sink != nullptr ? *rule.sink : -std::numeric_limits<double>::infinity();
    for (const Key& key : keys) {
        double score = 0.0;
        for (size_t d = 0; d < q.size(); ++d) {
            score += static_cast<double>(q[d]) * key.k[d];
        }
        score *= rule.scale;
        if (rule.softcap > 0.0) {
            score = rule.softcap * std::tanh(score / rule.softcap);
        }
        scores.push_back(score);
        highest = std::max(highest, score);
    }
    Row row{std::vector<double>(value_dim, 0.0), -std::numeric_limits<double>::infinity()};
    if (std::isinf(highest)) {
        return row;
    }
    double sum = rule.sink != nullptr ? std::exp(*rule.sink - highest) : 0.0;
    for (size_t i = 0; i < keys.size(); ++i) {
        const double weight = std::exp(scores[i] - highest);
        sum += weight;
        for (int d = 0; d < value_dim; ++d) {
            row.out[d] += weight * keys[i].v[d];
        }
    }
    for (double& x : row.out) {
        x /= sum;
    }
    row.lse = highest + std::log(sum);
    return row;
}

// Largest |got - want|; infinite where one of them is NaN or infinite and the other is not the same.
class Worst {
public:
    void add(double got, double want) {
        const double error = got == want ? 0.0 : std::abs(got - want);
        value_ = std::isfinite(error) ? std::max(value_, error) : std::numeric_limits<double>::infinity();
    }
    double value() const { return value_; }

private:
    double value_ = 0.0;
};

// One line a case; the exit code says whether all were ok.
class Table {
public:
    Table() { std::printf("%-72s %10s %10s  %s\n", "case", "out", "lse", "ok"); }

    void add(const std::string& name, const Worst& out, const Worst& lse, double tolerance) {
        add_line(name, out.value(), lse.value(), out.value() <= tolerance && lse.value() <= LSE_TOLERANCE);
    }
    // A case that has no figures.
    void add(const std::string& name, bool is_ok) { add_line(name, 0.0, 0.0, is_ok); }

    int finish() const {
        std::printf("%d cases, %d failed\n", cases_, failed_);
        return cases_ == 0 || failed_ != 0 ? 1 : 0;
    }

private:
    void add_line(const std::string& name, double out, double lse, bool is_ok) {
        std::printf("%-72s %10.2e %10.2e  %s\n", name.c_str(), out, lse, is_ok ? "ok" : "FAILED");
        ++cases_;
        failed_ += is_ok ? 0 : 1;
    }
    int cases_ = 0, failed_ = 0;
};

// Whether a call raises std::invalid_argument whose message starts with the name of the argument.
inline bool raises_for(const std::string& argument, const std::function<void()>& call) {
    try {
        call();
    } catch (const std::invalid_argument& error) {
        return std::string(error.what()).rfind(argument + ":", 0) == 0;
    }
    return false;
}

}  // namespace test
}  // namespace astrai
