// Rotary embedding of every head of q and k in one launch, with the write of K and V to a pool.
//
// A row is one head of one token. Its work is cut into units: RUN pairs to turn, or RUN elements to copy.
// Threads stride over the units of all rows. No two units share an element, so a row may be its own target.
#pragma once

#include "csrc/kernels/rotary_common.h"
#include "csrc/kernels/rotary_vectors.cuh"

namespace astrai {

constexpr int ROTARY_THREADS = 256;

// Whether k and v go to a pool, which may have no slots and so no address.
ASTRAI_HOST_DEVICE bool has_pool(const RotaryParams& p) { return p.out_cache_loc != nullptr; }

// Where one row comes from and goes to.
template <class T>
struct RotaryRow {
    const T* from = nullptr;
    T* to = nullptr;  // null: the row is dropped
    int turned = 0;   // leading elements that turn
    int end = 0;      // elements [turned, end) are copied
};

template <class T>
ASTRAI_DEVICE RotaryRow<T> find_q_row(const RotaryParams& p, int64_t b, int64_t t, int64_t head) {
    RotaryRow<T> row;
    row.from = static_cast<const T*>(p.q) + b * p.q_stride_b + t * p.q_stride_t + head * p.q_stride_h;
    row.to = static_cast<T*>(p.q_out) + b * p.q_out_stride_b + t * p.q_out_stride_t + head * p.q_out_stride_h;
    row.turned = p.rotary_dim;
    row.end = p.q_out == p.q ? p.rotary_dim : p.head_dim;
    return row;
}

template <class T>
ASTRAI_DEVICE RotaryRow<T> find_k_row(const RotaryParams& p, int64_t b, int64_t t, int64_t head,
                                      int64_t slot) {
    RotaryRow<T> row;
    row.from = static_cast<const T*>(p.k) + b * p.k_stride_b + t * p.k_stride_t + head * p.k_stride_h;
    row.turned = p.rotary_dim;
    row.end = p.k_out == p.k ? p.rotary_dim : p.head_dim;
    if (!has_pool(p)) {
        row.to = static_cast<T*>(p.k_out) + b * p.k_out_stride_b + t * p.k_out_stride_t +
                 head * p.k_out_stride_h;
    } else if (slot >= 0) {
        row.to = static_cast<T*>(p.k_pool) + slot * p.k_pool_stride_n + head * p.k_pool_stride_h;
    }
    return row;
}

template <class T>
ASTRAI_DEVICE RotaryRow<T> find_v_row(const RotaryParams& p, int64_t t, int64_t head, int64_t slot) {
    RotaryRow<T> row;
    row.from = static_cast<const T*>(p.v) + t * p.v_stride_t + head * p.v_stride_h;
    row.end = p.value_dim;
    if (slot >= 0) {
        row.to = static_cast<T*>(p.v_pool) + slot * p.v_pool_stride_n + head * p.v_pool_stride_h;
    }
    return row;
}

// Row number head of a token: its heads of q, then those of k, then those of v.
template <class T>
ASTRAI_DEVICE RotaryRow<T> find_row(const RotaryParams& p, int64_t b, int64_t t, int64_t head) {
    if (head < p.q_heads) {
        return find_q_row<T>(p, b, t, head);
    }
    int64_t slot = -1;
    if (has_pool(p)) {
        slot = load_global(p.out_cache_loc + t * p.loc_stride);
        slot = slot < p.num_slots ? slot : -1;
    }
    head -= p.q_heads;
    if (head < p.kv_heads) {
        return find_k_row<T>(p, b, t, head, slot);
    }
    return find_v_row<T>(p, t, head - p.kv_heads, slot);
}

// (a, b) becomes (a cos - b sin, b cos + a sin): in float32, rounded once.
template <class T>
ASTRAI_DEVICE void turn_pair(T& first, T& second, float cos, float sin) {
    const float a = to_float(first), b = to_float(second);
    first = from_float<T>(a * cos - b * sin);
    second = from_float<T>(b * cos + a * sin);
}

// Turns pairs [pair, pair + RUN) of a row by the angles at freqs.
template <class T, Pairing PAIRING, int RUN>
ASTRAI_DEVICE void turn_run(const RotaryRow<T>& row, const float* freqs, int pair) {
    float cos_sin[2 * RUN];
    load_values(freqs + 2 * pair, cos_sin);
    if constexpr (PAIRING == Pairing::adjacent) {
        T values[2 * RUN];
        load_values(row.from + 2 * pair, values);
        ASTRAI_UNROLL
        for (int i = 0; i < RUN; ++i) {
            turn_pair(values[2 * i], values[2 * i + 1], cos_sin[2 * i], cos_sin[2 * i + 1]);
        }
        store_values(row.to + 2 * pair, values);
    } else {
        const int half = row.turned / 2;
        T first[RUN], second[RUN];
        load_values(row.from + pair, first);
        load_values(row.from + half + pair, second);
        ASTRAI_UNROLL
        for (int i = 0; i < RUN; ++i) {
            turn_pair(first[i], second[i], cos_sin[2 * i], cos_sin[2 * i + 1]);
        }
        store_values(row.to + pair, first);
        store_values(row.to + half + pair, second);
    }
}

// Units of the longest row of a call.
inline int count_row_units(const RotaryParams& p, int run) {
    const bool is_copied = has_pool(p) || p.q_out != p.q || p.k_out != p.k;
    const int pairs = p.rotary_dim / 2;
    const int of_heads = (pairs + (is_copied ? p.head_dim - p.rotary_dim : 0)) / run;
    const int of_values = has_pool(p) ? p.value_dim / run : 0;
    return of_heads > of_values ? of_heads : of_values;
}

// Rows of one token.
inline int count_token_rows(const RotaryParams& p) {
    return p.q_heads + (p.k != nullptr ? p.kv_heads : 0) + (has_pool(p) ? p.kv_heads : 0);
}

// What one launch needs beyond the call itself.
struct RotaryLaunch {
    RotaryParams params;
    int row_units;
    int token_rows;
};

template <class T, Pairing PAIRING, int RUN>
ASTRAI_GLOBAL(ROTARY_THREADS) rotary_kernel(RotaryLaunch launch) {
    const RotaryParams& p = launch.params;
    const int64_t num_units = static_cast<int64_t>(p.num_b) * p.num_t * launch.token_rows * launch.row_units;
    const int64_t step = static_cast<int64_t>(gridDim.x) * ROTARY_THREADS;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * ROTARY_THREADS + threadIdx.x;
    for (int64_t i = first; i < num_units; i += step) {
        const int unit = static_cast<int>(i % launch.row_units);
        const int64_t token_row = i / launch.row_units;
        const int64_t token = token_row / launch.token_rows;
        const int64_t b = token / p.num_t, t = token % p.num_t;
        const RotaryRow<T> row = find_row<T>(p, b, t, token_row % launch.token_rows);
        const int turns = row.turned / 2 / RUN;
        const int rest = row.turned + (unit - turns) * RUN;
        if (row.to == nullptr) {
            continue;
        }
        if (unit < turns) {
            turn_run<T, PAIRING, RUN>(row, p.freqs + b * p.freqs_stride_b + t * p.freqs_stride_t, unit * RUN);
        } else if (rest < row.end) {
            copy_values<RUN>(row.from + rest, row.to + rest);
        }
    }
}

}  // namespace astrai
