// How long a rank waits for others before it warns, and before it gives up.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

namespace ddpx::health {

// Settings of this process. Any thread may change them at any time.
struct StallTimeouts {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  std::atomic<int64_t> warn_ns{10'000'000'000};
  std::atomic<int64_t> raise_ns{kNever};
  std::atomic<bool> with_stacks{false};  // warnings have the Python stacks of missing ranks

  static StallTimeouts& instance() {
    static StallTimeouts timeouts;
    return timeouts;
  }
};

}  // namespace ddpx::health
