// The clock of the failure detector.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <thread>

#include "../times.h"

namespace ddpx::health {

// Nanoseconds since the start of the machine. The clock is the same for all its processes, and goes
// on while the machine is suspended.
inline int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_BOOTTIME, &time);
  return int64_t{time.tv_sec} * times::kSecond + time.tv_nsec;
}

// Polls until `condition` holds, or the clock has reached `deadline_ns`. Returns the condition.
template <class Condition>
bool poll_until(int64_t deadline_ns, int64_t period_ns, const Condition& condition) {
  while (!condition()) {
    if (now_ns() >= deadline_ns) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(period_ns));
  }
  return true;
}

// Detects that this process, or its machine, was stopped for a while. A rank that was stopped has
// not waited for other ranks in this time. One thread calls update(), any thread the other methods.
class AwakeTime {
 public:
  // The caller calls this several times a second.
  void update(int64_t now_ns) {
    if (now_ns - updated_ns_ > times::kStopped) {
      since_ns_ = now_ns;
    }
    updated_ns_ = now_ns;
  }

  // The end of the last stop; the first update counts as one.
  int64_t since_ns() const {
    return since_ns_;
  }

  // The time from `start_ns`, or from the end of a later stop, to `now_ns`.
  int64_t lasted_ns(int64_t start_ns, int64_t now_ns) const {
    return std::max<int64_t>(0, now_ns - std::max<int64_t>(start_ns, since_ns_));
  }

 private:
  int64_t updated_ns_ = 0;
  std::atomic<int64_t> since_ns_{0};
};

}  // namespace ddpx::health
