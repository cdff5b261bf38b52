// The scratch of a forward: where activations lie.
#pragma once

#include <cstdint>

#include "shape.h"

namespace astrai {

// Rows of activations in scratch, `stride` elements apart.
template <class T>
struct Rows {
  T* data;
  int64_t stride;

  T* row(int64_t i) const { return data + i * stride; }
};

// Scratch of a forward, cut from one arena. Rows are padded to whole tiles; padding of columns is zero for good.
template <class Act>
struct Scratch {
  Rows<float> residual, qkv, out;
  Rows<Act> hidden, attended, inner;
  Rows<uint8_t> quantised;
  float* parts;
  uint8_t* threads;
  int64_t thread_bytes;
};

// Hands out an arena piece by piece; without one it only counts.
struct Cutter {
  uint8_t* base;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base + used);
    used += round_up(count * int64_t(sizeof(T)), 128);
    return piece;
  }
  template <class T>
  Rows<T> take_rows(int64_t rows, int64_t stride) {
    return {take<T>(rows * stride), stride};
  }
};

}  // namespace astrai
