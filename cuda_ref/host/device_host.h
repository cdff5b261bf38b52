// The vocabulary of csrc/kernels/device_cuda.cuh on a CPU. Every access and every collective is
// checked; see README.md.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "host/collectives.h"
#include "host/launch.h"
#include "host/types.h"

#define ASTRAI_DEVICE inline
#define ASTRAI_HOST_DEVICE inline
#define ASTRAI_GLOBAL(...) inline void
#define ASTRAI_UNROLL
#define ASTRAI_NO_UNROLL
#define ASTRAI_NAMED(...) ::astrai::NamedKernel<decltype(&__VA_ARGS__)>{&__VA_ARGS__, #__VA_ARGS__}

namespace astrai {

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int WARP_SIZE = 32;

namespace host {

// Memory holds bytes, and moves a power of two of them at a time.
template <class T>
constexpr bool is_word() {
    return std::is_trivially_copyable<T>::value && sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0;
}

}  // namespace host

// One element, or 16 bytes at an address that is a multiple of 16.
template <class T>
T load_global(const T* address, host::Site site = host::Site::here()) {
    static_assert(host::is_word<T>(), "an access moves 1, 2, 4, 8 or 16 bytes");
    host::current_block->global().check(address, sizeof(T), false, site);
    T value;
    std::memcpy(&value, address, sizeof(T));
    return value;
}
template <class T>
void store_global(T* address, T value, host::Site site = host::Site::here()) {
    static_assert(host::is_word<T>(), "an access moves 1, 2, 4, 8 or 16 bytes");
    host::current_block->global().check(address, sizeof(T), true, site);
    std::memcpy(address, &value, sizeof(T));
}

// An array in the shared memory of the block. Indices count elements of T; V may be wider than T, then the
// address must be a multiple of its size.
template <class T>
struct Shared {
    static_assert(sizeof(T) >= 2, "accesses are followed in units of two bytes");

    uint32_t begin;  // byte offset
    uint32_t count;

    T load(int index, host::Site site = host::Site::here()) const { return load_as<T>(index, site); }
    void store(int index, T value, host::Site site = host::Site::here()) const {
        store_as<T>(index, value, site);
    }

    template <class V>
    V load_as(int index, host::Site site = host::Site::here()) const {
        host::Block& block = *host::current_block;
        const host::Touch touch = touch_as<V>(index, block, site);
        block.shared().read(touch);
        V value;
        std::memcpy(&value, block.shared().bytes() + touch.begin, sizeof(V));
        return value;
    }
    template <class V>
    void store_as(int index, V value, host::Site site = host::Site::here()) const {
        host::Block& block = *host::current_block;
        const host::Touch touch = touch_as<V>(index, block, site);
        block.shared().write(touch);
        std::memcpy(block.shared().bytes() + touch.begin, &value, sizeof(V));
    }

    // count elements from begin on.
    Shared slice(int first, int num_elements, host::Site site = host::Site::here()) const {
        host::check_slice(extent(), first, num_elements, site);
        return {begin + static_cast<uint32_t>(first * sizeof(T)), static_cast<uint32_t>(num_elements)};
    }

    host::ArrayExtent extent() const { return {begin, count, sizeof(T)}; }

    // An access to a V by the running thread. Raises unless it is inside the array and aligned.
    template <class V>
    host::Touch touch_as(int index, const host::Block& block, host::Site site) const {
        static_assert(host::is_word<V>() && sizeof(V) >= 2, "an access moves 2, 4, 8 or 16 bytes");
        const uint32_t offset = host::locate(extent(), index, sizeof(V), site);
        return {extent(), offset, sizeof(V), block.thread_number(), site};
    }
};

// count elements of T at a byte offset into the dynamic shared memory of the launch.
template <class T>
Shared<T> shared_array(int byte_offset, int count, host::Site site = host::Site::here()) {
    host::check_array(byte_offset, count, sizeof(T), host::current_block->shared().num_bytes(), site);
    return {static_cast<uint32_t>(byte_offset), static_cast<uint32_t>(count)};
}

#if !defined(ASTRAI_NO_MMA)

// Starts a copy of 16 bytes to dst[index ...]; zeros, and nothing is read, unless keep.
template <class T>
void cp_async_16(Shared<T> dst, int index, const T* src, bool keep, host::Site site = host::Site::here()) {
    host::Block& block = *host::current_block;
    if (keep) {
        block.global().check(src, sizeof(Bytes16), false, site);
    }
    const host::Touch target = dst.template touch_as<Bytes16>(index, block, site);
    block.copies().start(block.shared(), target, keep ? src : nullptr);
}

// Closes the group of the copies that this thread started.
inline void cp_async_commit() { host::current_block->copies().commit(); }

// Waits until at most PENDING of this thread's latest groups are unfinished. Others see the bytes after a
// barrier.
template <int PENDING>
void cp_async_wait(host::Site site = host::Site::here()) {
    static_assert(PENDING >= 0, "a number of groups");
    host::Block& block = *host::current_block;
    block.copies().wait(block.shared(), PENDING, site);
}

namespace host {

template <class T>
void load_matrices_at(Collective mode, uint32_t (&r)[4], Shared<T> array, int index, Site site) {
    static_assert(sizeof(T) == 2, "matrices of 16-bit elements");
    Block& block = *current_block;
    const Touch touch = array.template touch_as<Bytes16>(index, block, site);
    block.shared().read(touch);
    load_matrices(mode, block.shared().bytes() + touch.begin, r, site);
}

}  // namespace host

// Four 8x8 matrices of 16-bit elements. Lane 8 i + r gives the start of row r of matrix i, 16 bytes; it gets
// of matrix i the elements (lane / 4, 2 (lane % 4)) and the next in r[i]; transposed, row and column change
// places.
template <class T>
void ldmatrix_x4(uint32_t (&r)[4], Shared<T> array, int index, host::Site site = host::Site::here()) {
    host::load_matrices_at(host::Collective::ldmatrix, r, array, index, site);
}
template <class T>
void ldmatrix_x4_trans(uint32_t (&r)[4], Shared<T> array, int index, host::Site site = host::Site::here()) {
    host::load_matrices_at(host::Collective::ldmatrix_trans, r, array, index, site);
}

// d += a b, a [16, 16] row major, b [16, 8] column major, d [16, 8] float32; fragments as in the PTX manual.
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  host::Site site = host::Site::here()) {
    static_assert(std::is_same<T, bf16>::value || std::is_same<T, f16>::value,
                  "multiplies float16 or bfloat16");
    host::multiply_matrices<T>({d, a, b}, site);
}

#endif  // !ASTRAI_NO_MMA

}  // namespace astrai
