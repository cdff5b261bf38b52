// A team of threads that goes through the phases of a forward together.
//
// One OpenMP parallel region holds the whole forward, so that the threads are those torch computes with: a second
// pool would find its cores taken by torch's, which spin for a while after every operation. Inside it phases are
// divided by for_each and end at a barrier that spins.
#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace astrai {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Team {
 public:
  explicit Team(int num_threads) : cursors_(size_t(kSets) * num_threads) {}

  void begin(int num_threads) {
    num_threads_ = num_threads;
    for (auto& cursor : cursors_) cursor.next.store(0, std::memory_order_relaxed);
  }

  int num_threads() const { return num_threads_; }

  void wait() {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    // About 50 us of spinning; whoever is late by more has lost its core, maybe to this very thread. Tried: sleeping
    // on a futex. On a busy machine the woken thread lands on the waker's core and stays, and steps take twice as long.
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      relax();
      if (spins > 1000) sched_yield();
    }
  }

 private:
  friend class Worker;
  static constexpr int kSets = 2;
  struct alignas(64) Cursor {
    std::atomic<int64_t> next{0};
  };
  std::vector<Cursor> cursors_;
  int num_threads_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// One thread of a team.
class Worker {
 public:
  Worker(Team& team, int id) : team_(team), id_(id) {}

  int id() const { return id_; }
  int num_threads() const { return team_.num_threads_; }

  // fn(i) for every i below n, once, by some thread; returns when all are done.
  //
  // A thread takes its own part of the range in order, since neighbours in the range are neighbours in memory,
  // and then what others have left: a thread that lost its core for a while holds nobody up. Which thread takes
  // what must not matter to the result.
  template <class Fn>
  void for_each(int64_t n, Fn&& fn) {
    const int threads = team_.num_threads_;
    auto* set = &team_.cursors_[size_t(phase_ % Team::kSets) * threads];
    // The other set: its users came to the last barrier before this phase began, its next ones wait for the next.
    team_.cursors_[size_t((phase_ + 1) % Team::kSets) * threads + id_].next.store(0, std::memory_order_relaxed);
    for (int step = 0; step < threads; ++step) {
      const int owner = id_ + step < threads ? id_ + step : id_ + step - threads;
      const int64_t first = n * owner / threads, last = n * (owner + 1) / threads;
      if (first == last) continue;
      for (int64_t i; (i = first + set[owner].next.fetch_add(1, std::memory_order_relaxed)) < last;) fn(i);
    }
    ++phase_;
    team_.wait();
  }

 private:
  Team& team_;
  const int id_;
  uint32_t phase_ = 0;
};

}  // namespace astrai
