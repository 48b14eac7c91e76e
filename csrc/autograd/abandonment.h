// The error of backwards whose observer was destroyed.
#pragma once

#include <mutex>
#include <optional>
#include <utility>

#include "../errors.h"

namespace ddpx {

// Without set(), such a backward raises nothing. Thread-safe.
class Abandonment {
 public:
  void set(UserError error) {
    const std::scoped_lock lock(mutex_);
    error_ = std::move(error);
  }
  void raise() const {
    const std::scoped_lock lock(mutex_);
    if (error_) {
      throw UserError(*error_);
    }
  }

 private:
  mutable std::mutex mutex_;
  std::optional<UserError> error_;
};

}  // namespace ddpx
