// Warnings about long waits of this rank, and the stall error.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "../group_state.h"
#include "wait_search.h"

namespace ddpx::health {

// The time limits of a wait for other ranks: until a warning, and until an error. Settings of this
// process. Any thread may change them at any time.
struct StallTimeouts {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  std::atomic<int64_t> warn_ns{times::kWarn};
  std::atomic<int64_t> raise_ns{kNever};
  std::atomic<bool> with_stacks{false};  // warnings have the Python stacks of missing ranks

  static StallTimeouts& instance() {
    static StallTimeouts timeouts;
    return timeouts;
  }
};

// Owned by the monitor. The watchdog's thread calls check(), any thread find_stall().
class StallWatch {
 public:
  explicit StallWatch(GroupState& state) : state_(state) {}

  // Warns if the wait of this rank takes long. Returns a failure if the wait takes too long.
  // `group_failed`: the wait will end for this reason.
  std::optional<Failure> check(std::optional<Wait> wait, const AwakeTime& awake, bool group_failed);

  // The failure if a wait ends without success after `waited_ns`, and all ranks live. nullopt if
  // no rank is missing, and this rank is in a communication hook.
  std::optional<Failure> find_stall(const Wait& wait, int64_t waited_ns) const;

 private:
  // The current wait.
  struct Current {
    int64_t since_ns = 0;  // 0: this rank waits for no other rank
    int64_t waited_ns = 0;
    int64_t next_warning_ns = 0;  // after the start of the wait; 0: no warning yet
    int64_t asked_ns = 0;         // when other hosts were first asked for their states
    std::vector<int> missing;     // at the last warning
  };

  int64_t raise_ns(const Wait& wait) const;
  void warn(const Wait& wait);
  void log_end(const Current& wait) const;
  void log_stack_of(int rank) const;
  std::string describe_late(const Wait& wait, int rank) const;
  std::vector<int> most_to_blame(const Wait& wait) const;
  std::optional<std::string> uneven_sequences(const Activity& own) const;

  GroupState& state_;
  Current current_;
};

}  // namespace ddpx::health
