// How long a rank waits for others before it says so, and before it gives up.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>

namespace ddpx::health {

// Of this process; may be changed at any time.
struct StallTimeouts {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  std::atomic<int64_t> warn_ns{10'000'000'000};
  std::atomic<int64_t> raise_ns{kNever};
  std::atomic<bool> with_stacks{false};  // warnings bring the Python stacks of missing ranks

  static StallTimeouts& instance();
};

// One wait after the other, and the warnings about each: after `warn`, then after twice as long...
class StallTimer {
 public:
  enum class Due { kNothing, kWarning, kGiveUp, kOver };

  // `since_ns` tells one wait from the next; 0 while there is none.
  Due look(int64_t since_ns, int64_t waited_ns, const StallTimeouts& timeouts);

  // Of a wait that is due to be given up, and is not: a warning, or nothing.
  Due look_on(int64_t waited_ns, const StallTimeouts& timeouts);

  // The length of the last wait.
  int64_t last_wait_ns() const {
    return last_wait_ns_;
  }

 private:
  int64_t since_ns_ = 0;
  int64_t num_warnings_ = 0;
  int64_t next_warning_ns_ = 0;  // after the start of the wait; but the first
  int64_t last_wait_ns_ = 0;
};

}  // namespace ddpx::health
