// What kernels use of CUDA, under nvcc. host/device_host.h gives the same names a meaning on a CPU.
//
// Kernels touch memory only through load_global, store_global, Shared<T> and cp_async_16, and exchange values only
// through the collectives below, so that the CPU runtime sees every access.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define ASTRAI_DEVICE __device__ __forceinline__
#define ASTRAI_HOST_DEVICE __host__ __device__ __forceinline__
// Threads of a block and, optionally, how many blocks of one multiprocessor registers must suffice for.
#define ASTRAI_GLOBAL(...) __global__ void __launch_bounds__(__VA_ARGS__)
#define ASTRAI_UNROLL _Pragma("unroll")
// Where unrolling would cost more registers than it saves time.
#define ASTRAI_NO_UNROLL _Pragma("unroll 1")
// A kernel together with its spelling, for messages.
#define ASTRAI_NAMED(...) ::astrai::NamedKernel<decltype(&__VA_ARGS__)>{&__VA_ARGS__, #__VA_ARGS__}

namespace astrai {

using bf16 = __nv_bfloat16;
using f16 = __half;
using Stream = cudaStream_t;

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int WARP_SIZE = 32;

// 16 bytes that move in one access.
struct alignas(16) Bytes16 {
    uint32_t word[4];
};

ASTRAI_DEVICE float to_float(float x) { return x; }
ASTRAI_DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
ASTRAI_DEVICE float to_float(f16 x) { return __half2float(x); }

// Rounds to nearest, ties to even.
template <class T>
ASTRAI_DEVICE T from_float(float x);
template <>
ASTRAI_DEVICE float from_float<float>(float x) { return x; }
template <>
ASTRAI_DEVICE bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <>
ASTRAI_DEVICE f16 from_float<f16>(float x) { return __float2half_rn(x); }

// Two 16-bit values in one register, the first in the low half.
template <class T>
ASTRAI_DEVICE uint32_t pack_pair(float low, float high);
template <>
ASTRAI_DEVICE uint32_t pack_pair<bf16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}
template <>
ASTRAI_DEVICE uint32_t pack_pair<f16>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

// One element, or 16 bytes at an address that is a multiple of 16.
template <class T>
ASTRAI_DEVICE T load_global(const T* address) { return *address; }
ASTRAI_DEVICE Bytes16 load_global(const Bytes16* address) {
    const uint4 x = *reinterpret_cast<const uint4*>(address);
    return {{x.x, x.y, x.z, x.w}};
}
template <class T>
ASTRAI_DEVICE void store_global(T* address, T value) { *address = value; }
ASTRAI_DEVICE void store_global(Bytes16* address, Bytes16 x) {
    *reinterpret_cast<uint4*>(address) = make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]);
}

extern __shared__ __align__(16) unsigned char astrai_shared_bytes[];

// An array in the shared memory of the block. Indices count elements of T; V may be wider than T, then the
// address must be a multiple of its size.
template <class T>
struct Shared {
    T* data;

    ASTRAI_DEVICE T load(int index) const { return data[index]; }
    ASTRAI_DEVICE void store(int index, T value) const { data[index] = value; }
    template <class V>
    ASTRAI_DEVICE V load_as(int index) const { return *reinterpret_cast<const V*>(data + index); }
    template <class V>
    ASTRAI_DEVICE void store_as(int index, V value) const { *reinterpret_cast<V*>(data + index) = value; }
    // count elements from begin on.
    ASTRAI_DEVICE Shared slice(int begin, int /*count*/) const { return {data + begin}; }
};

// count elements of T at a byte offset into the dynamic shared memory of the launch.
template <class T>
ASTRAI_DEVICE Shared<T> shared_array(int byte_offset, int /*count*/) {
    return {reinterpret_cast<T*>(astrai_shared_bytes + byte_offset)};
}

#if !defined(ASTRAI_NO_MMA)

template <class T>
ASTRAI_DEVICE uint32_t shared_address(Shared<T> array, int index) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(array.data + index));
}

// Starts a copy of 16 bytes to dst[index ...]; zeros, and nothing is read, unless keep.
template <class T>
ASTRAI_DEVICE void cp_async_16(Shared<T> dst, int index, const T* src, bool keep) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(dst, index)), "l"(src),
                 "r"(keep ? 16 : 0)
                 : "memory");
}

// Closes the group of the copies that this thread started.
ASTRAI_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are unfinished. Others see the bytes after a barrier.
template <int PENDING>
ASTRAI_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory"); }

// Four 8x8 matrices of 16-bit elements. Lane 8 i + r gives the start of row r of matrix i, 16 bytes; it gets of
// matrix i the elements (lane / 4, 2 (lane % 4)) and the next in r[i]; transposed, row and column change places.
template <class T>
ASTRAI_DEVICE void ldmatrix_x4(uint32_t (&r)[4], Shared<T> array, int index) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(array, index))
                 : "memory");
}
template <class T>
ASTRAI_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], Shared<T> array, int index) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(array, index))
                 : "memory");
}

// d += a b, a [16, 16] row major, b [16, 8] column major, d [16, 8] float32; fragments as in the PTX manual.
template <class T>
ASTRAI_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
ASTRAI_DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
ASTRAI_DEVICE void mma_m16n8k16<f16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif  // !ASTRAI_NO_MMA

template <class Function>
struct NamedKernel {
    Function function;
    const char* name;
};

inline void check_cuda(cudaError_t status, const char* name) {
    if (status != cudaSuccess) {
        throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(status));
    }
}

// Runs a kernel on a stream; an empty grid runs nothing.
template <class Params>
void launch(NamedKernel<void (*)(Params)> kernel, dim3 grid, int threads, int shared_bytes, Stream stream,
            const Params& params) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
        return;
    }
    if (shared_bytes > 48 * 1024) {
        check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.function),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                   kernel.name);
    }
    kernel.function<<<grid, threads, shared_bytes, stream>>>(params);
    check_cuda(cudaGetLastError(), kernel.name);
}

}  // namespace astrai
