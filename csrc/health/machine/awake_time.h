// Since when this process has run without a stop.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace ddpx::health {

// Detects that this process, or its machine, was stopped for a while. A rank that was stopped has
// not waited for other ranks in this time. One thread calls look(), any thread the other methods.
class AwakeTime {
 public:
  // To be called several times a second.
  void look(int64_t now_ns) {
    if (now_ns - looked_ns_ > kStoppedNs) {
      since_ns_ = now_ns;
    }
    looked_ns_ = now_ns;
  }

  // The end of the last stop; the first look counts as one.
  int64_t since_ns() const {
    return since_ns_;
  }

  // The time from `start_ns`, or from the end of a later stop, to `now_ns`.
  int64_t lasted_ns(int64_t start_ns, int64_t now_ns) const {
    return std::max<int64_t>(0, now_ns - std::max<int64_t>(start_ns, since_ns_));
  }

 private:
  static constexpr int64_t kStoppedNs = 1'500'000'000;  // between two looks

  int64_t looked_ns_ = 0;
  std::atomic<int64_t> since_ns_{0};
};

}  // namespace ddpx::health
