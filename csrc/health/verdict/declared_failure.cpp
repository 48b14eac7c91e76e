#include "declared_failure.h"

#include <utility>

namespace ddpx::health {

std::optional<Failure> DeclaredFailure::get() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

bool DeclaredFailure::set(Failure failure, HostTable* host) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) {
    return false;
  }
  if (host != nullptr) {
    const auto standing = host->declare(failure.to_text(), now_ns());
    failure = Failure::from_text(standing).value_or(failure);
  }
  failure_ = std::move(failure);
  exists_.store(true, std::memory_order_release);
  changed_.notify_all();
  return true;
}

void DeclaredFailure::wait_for(std::chrono::nanoseconds time) const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, time, [this] { return failure_.has_value(); });
}

}  // namespace ddpx::health
