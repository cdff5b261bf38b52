// How long the phases of a forward take.
#pragma once

#include <ctime>

#include "shape.h"

// CLOCK_THREAD_CPUTIME_ID tells phases of one thread apart on a machine that others use too.
#ifndef ASTRAI_CLOCK
#define ASTRAI_CLOCK CLOCK_MONOTONIC
#endif

namespace astrai {

// Adds the time since the last lap to a phase; without a place to add to it does nothing.
class Clock {
 public:
  explicit Clock(double* seconds) : seconds_(seconds) { lap(kNumPhases); }

  void lap(Phase phase) {
    if (!seconds_) return;
    timespec time;
    clock_gettime(ASTRAI_CLOCK, &time);
    const double now = double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
    if (phase != kNumPhases) seconds_[phase] += now - last_;
    last_ = now;
  }

 private:
  double* seconds_;
  double last_ = 0;
};

}  // namespace astrai
