// The failure that a rank reports.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "../machine/host_table.h"
#include "failure.h"

namespace ddpx::health {

// Set once. Owned by the monitor. Thread-safe.
class DeclaredFailure {
 public:
  // One atomic load.
  bool exists() const {
    return exists_.load(std::memory_order_acquire);
  }
  std::optional<Failure> get() const;

  // Returns false if there is a failure already. If another rank of the host has declared a
  // failure, this rank takes over that failure. `host` is null while this rank does not know its
  // host.
  bool set(Failure failure, HostTable* host);

  // Waits until the failure exists, at most for `time`.
  void wait_for(std::chrono::nanoseconds time) const;

 private:
  mutable std::mutex mutex_;  // guards `failure_`
  mutable std::condition_variable changed_;
  std::optional<Failure> failure_;
  std::atomic<bool> exists_{false};
};

}  // namespace ddpx::health
