// The device vocabulary of every kernel here: CUDA under nvcc, the checking CPU runtime under g++ -DASTRAI_HOST.
#pragma once

#if defined(ASTRAI_HOST)
#include "host/device_host.h"
#else
#include "csrc/kernels/device_cuda.cuh"
#endif
