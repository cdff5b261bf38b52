// Memory for weights and scratch, on huge pages where the system has them.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

#include "shape.h"

namespace astrai {

// Zeroed and aligned. A stream through 4 KiB pages would miss the TLB every 64 lines and stop the prefetcher at the
// end of each; 2 MiB pages are asked for, and not insisted on.
class Arena {
 public:
  Arena() = default;
  explicit Arena(int64_t bytes) : bytes_(round_up(bytes + kSlack, kHuge)) {
    void* p = mmap(nullptr, size_t(bytes_ + kHuge), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mapped_ = p;
    base_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<int64_t>(p), kHuge));
    madvise(base_, size_t(bytes_), MADV_HUGEPAGE);
  }
  Arena(Arena&& other) noexcept { *this = std::move(other); }
  Arena& operator=(Arena&& other) noexcept {
    std::swap(mapped_, other.mapped_);
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Arena() {
    if (mapped_) munmap(mapped_, size_t(bytes_ + kHuge));
  }

  uint8_t* base() const { return base_; }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kHuge = 2 << 20;
  // Kernels prefetch beyond the end, which is harmless, but should hit no unmapped page: that is slow.
  static constexpr int64_t kSlack = 64 << 10;
  void* mapped_ = nullptr;
  uint8_t* base_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace astrai
