// A backend that knows the monitor of its group.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <mutex>

#include "../health/monitor.h"

namespace ddpx {

// Base of a backend for CPU tensors. monitor_of() sets the monitor. Thread-safe.
class WatchedBackend : public c10d::Backend {
 public:
  using c10d::Backend::Backend;

  void set_monitor(const std::shared_ptr<health::Monitor>& monitor) {
    const std::lock_guard<std::mutex> lock(monitor_mutex_);
    monitor_ = monitor;
  }

  // Null if monitor_of() was not called, or if the group has no monitor.
  std::shared_ptr<health::Monitor> monitor() const {
    const std::lock_guard<std::mutex> lock(monitor_mutex_);
    return monitor_.lock();
  }

 private:
  mutable std::mutex monitor_mutex_;
  std::weak_ptr<health::Monitor> monitor_;
};

}  // namespace ddpx
