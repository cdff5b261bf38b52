// Arguments of every kernel of these tests.
#pragma once

#include "csrc/kernels/device.cuh"

namespace astrai {
namespace mini {

struct Args {
    const void* x = nullptr;
    const void* y = nullptr;
    void* out = nullptr;
    int n = 0;
    int is_broken = 0;  // of kernels/faults_*.cuh: break the rule, or keep it

    template <class T>
    ASTRAI_DEVICE const T* x_as() const { return static_cast<const T*>(x); }
    template <class T>
    ASTRAI_DEVICE const T* y_as() const { return static_cast<const T*>(y); }
    template <class T>
    ASTRAI_DEVICE T* out_as() const { return static_cast<T*>(out); }
};

}  // namespace mini
}  // namespace astrai
