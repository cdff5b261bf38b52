// Element types of the kernels on a CPU: bfloat16 and float16 as bit patterns, and the conversions of CUDA.
#pragma once

#include <cstdint>
#include <cstring>

namespace astrai {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// 16 bytes that move in one access.
struct alignas(16) Bytes16 {
    uint32_t word[4];
};

namespace host {

// What CUDA gives for every NaN.
constexpr uint16_t CANONICAL_NAN = 0x7fff;

inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}

inline float bits_to_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}

inline bool is_nan_bits(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// Shifts right by 1 ... 31 and rounds to nearest, ties to even.
inline uint32_t shift_rounded(uint32_t x, int shift) {
    const uint32_t half = 1u << (shift - 1);
    return (x + half - 1 + ((x >> shift) & 1u)) >> shift;
}

inline uint16_t float_to_bf16_bits(float x) {
    const uint32_t bits = float_to_bits(x);
    return is_nan_bits(bits) ? CANONICAL_NAN : static_cast<uint16_t>(shift_rounded(bits, 16));
}

// Integer arithmetic only: the result does not depend on whether the CPU flushes subnormal numbers to zero.
inline uint16_t float_to_f16_bits(float x) {
    constexpr uint32_t OVERFLOWS = 0x477ff000u;        // 65520, half way to the number after the largest
    constexpr uint32_t SMALLEST_NORMAL = 0x38800000u;  // 2^-14
    constexpr uint32_t HALF_SMALLEST = 0x33000000u;    // 2^-25, ties with zero
    constexpr uint32_t REBIAS = (127u - 15u) << 23;
    const uint32_t bits = float_to_bits(x), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = bits >> 16 & 0x8000u;
    if (is_nan_bits(bits)) {
        return CANONICAL_NAN;
    }
    if (magnitude >= OVERFLOWS) {
        return static_cast<uint16_t>(sign | 0x7c00u);
    }
    if (magnitude >= SMALLEST_NORMAL) {
        return static_cast<uint16_t>(sign | shift_rounded(magnitude - REBIAS, 13));
    }
    if (magnitude <= HALF_SMALLEST) {
        return static_cast<uint16_t>(sign);
    }
    const int exponent = static_cast<int>(magnitude >> 23);
    const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    // The unit of a subnormal float16 is 2^-24; the significand counts units of 2^(exponent - 150).
    return static_cast<uint16_t>(sign | shift_rounded(significand, 126 - exponent));
}

inline float f16_bits_to_float(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 0x1fu;
    uint32_t fraction = half & 0x3ffu;
    if (exponent == 0x1fu) {
        return bits_to_float(sign | 0x7f800000u | fraction << 13);
    }
    if (exponent != 0) {
        return bits_to_float(sign | (exponent + 112u) << 23 | fraction << 13);
    }
    if (fraction == 0) {
        return bits_to_float(sign);
    }
    const uint32_t shift = static_cast<uint32_t>(__builtin_clz(fraction)) - 21u;
    fraction = fraction << shift & 0x3ffu;
    return bits_to_float(sign | (113u - shift) << 23 | fraction << 13);
}

}  // namespace host

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return host::bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(f16 x) { return host::f16_bits_to_float(x.bits); }

// Rounds to nearest, ties to even.
template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) { return x; }
template <>
inline bf16 from_float<bf16>(float x) { return {host::float_to_bf16_bits(x)}; }
template <>
inline f16 from_float<f16>(float x) { return {host::float_to_f16_bits(x)}; }

// Two 16-bit values in one register, the first in the low half.
template <class T>
uint32_t pack_pair(float low, float high) {
    return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}

}  // namespace astrai
