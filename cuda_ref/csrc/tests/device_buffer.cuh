// Memory that kernels may touch: of the GPU under nvcc, checked plain memory in the host build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "csrc/kernels/device.cuh"
#if defined(ASTRAI_HOST)
#include "host/global_memory.h"
#endif

namespace astrai {
namespace test {

// A copy of some elements where kernels find them.
template <class T>
class DeviceBuffer {
public:
#if defined(ASTRAI_HOST)
    explicit DeviceBuffer(std::vector<T> elements) : count_(elements.size()), elements_(std::move(elements)) {
        data_ = count_ != 0 ? elements_.data() : nullptr;
    }
    std::vector<T> read() const { return elements_; }
#else
    explicit DeviceBuffer(const std::vector<T>& elements) : count_(elements.size()) {
        if (count_ != 0) {
            check_cuda(cudaMalloc(reinterpret_cast<void**>(&data_), count_ * sizeof(T)), "cudaMalloc");
            check_cuda(cudaMemcpy(data_, elements.data(), count_ * sizeof(T), cudaMemcpyHostToDevice),
                       "cudaMemcpy");
        }
    }
    ~DeviceBuffer() { cudaFree(data_); }
    // Waits for what was launched before.
    std::vector<T> read() const {
        std::vector<T> elements(count_);
        if (count_ != 0) {
            check_cuda(cudaMemcpy(elements.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
                       "cudaMemcpy");
        }
        return elements;
    }
#endif
    DeviceBuffer(const DeviceBuffer&) = delete;
    DeviceBuffer& operator=(const DeviceBuffer&) = delete;

    // Null if there are no elements.
    T* data() { return data_; }
    size_t num_bytes() const { return count_ * sizeof(T); }

private:
    size_t count_;
    T* data_ = nullptr;
#if defined(ASTRAI_HOST)
    std::vector<T> elements_;
#endif
};

// What a call may touch; the host build raises at anything else. Under nvcc compute-sanitizer does that.
class CallMemory {
public:
    template <class T>
    void allow_read(DeviceBuffer<T>& buffer) {
        add(buffer.data(), buffer.num_bytes(), false);
    }
    template <class T>
    void allow_write(DeviceBuffer<T>& buffer) {
        add(buffer.data(), buffer.num_bytes(), true);
    }

    template <class Run>
    void call(Run&& run) const {
#if defined(ASTRAI_HOST)
        const host::MemoryScope scope(ranges_);
        run();
#else
        run();
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
#endif
    }

private:
#if defined(ASTRAI_HOST)
    void add(const void* data, size_t num_bytes, bool is_writable) {
        ranges_.push_back({reinterpret_cast<uintptr_t>(data), num_bytes, is_writable});
    }
    std::vector<host::MemoryRange> ranges_;
#else
    void add(const void*, size_t, bool) {}
#endif
};

}  // namespace test
}  // namespace astrai
