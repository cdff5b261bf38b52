// Runs of neighbouring elements between global memory and registers, 16 bytes at a time where they fill them.
#pragma once

#include <cstring>

#include "csrc/kernels/device.cuh"

namespace astrai {

// Whether COUNT elements move in whole accesses of 16 bytes; their address must then be a multiple of 16.
template <class T, int COUNT>
constexpr bool MOVES_16_BYTES = COUNT * sizeof(T) % sizeof(Bytes16) == 0;

template <int COUNT, class T>
ASTRAI_DEVICE void load_values(const T* address, T (&values)[COUNT]) {
    if constexpr (MOVES_16_BYTES<T, COUNT>) {
        constexpr int STEP = sizeof(Bytes16) / sizeof(T);
        ASTRAI_UNROLL
        for (int i = 0; i < COUNT; i += STEP) {
            const Bytes16 bytes = load_global(reinterpret_cast<const Bytes16*>(address + i));
            memcpy(values + i, &bytes, sizeof(Bytes16));
        }
    } else {
        ASTRAI_UNROLL
        for (int i = 0; i < COUNT; ++i) {
            values[i] = load_global(address + i);
        }
    }
}

template <int COUNT, class T>
ASTRAI_DEVICE void store_values(T* address, const T (&values)[COUNT]) {
    if constexpr (MOVES_16_BYTES<T, COUNT>) {
        constexpr int STEP = sizeof(Bytes16) / sizeof(T);
        ASTRAI_UNROLL
        for (int i = 0; i < COUNT; i += STEP) {
            Bytes16 bytes;
            memcpy(&bytes, values + i, sizeof(Bytes16));
            store_global(reinterpret_cast<Bytes16*>(address + i), bytes);
        }
    } else {
        ASTRAI_UNROLL
        for (int i = 0; i < COUNT; ++i) {
            store_global(address + i, values[i]);
        }
    }
}

// Moves the bits: a NaN keeps its payload.
template <int COUNT, class T>
ASTRAI_DEVICE void copy_values(const T* from, T* to) {
    T values[COUNT];
    load_values(from, values);
    store_values(to, values);
}

}  // namespace astrai
