#include "arrival_tracker.h"

#include <algorithm>

namespace ddpx {

ArrivalTracker::ArrivalTracker(std::size_t num_params, GraphMode mode)
    : mode_(mode), arrived_(num_params, 0) {}

void ArrivalTracker::begin() {
  std::fill(arrived_.begin(), arrived_.end(), 0);
}

Arrival ArrivalTracker::arrive(std::size_t param_index) {
  const auto count = ++arrived_[param_index];
  if (learning()) {
    return Arrival::kPartial;
  }
  const uint32_t expected = expected_.empty() ? 1 : expected_[param_index];
  if (count == expected) {
    return Arrival::kFinal;
  }
  return count < expected ? Arrival::kPartial : Arrival::kRepeated;
}

std::vector<std::size_t> ArrivalTracker::missing() const {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < arrived_.size(); ++i) {
    const uint32_t expected = expected_.empty() ? 1 : expected_[i];
    if (arrived_[i] < expected) {
      indices.push_back(i);
    }
  }
  return indices;
}

void ArrivalTracker::end() {
  if (!learning()) {
    return;
  }
  expected_ = arrived_;
  for (std::size_t i = 0; i < expected_.size(); ++i) {
    if (expected_[i] == 0) {
      known_unused_.push_back(i);
    }
  }
}

}  // namespace ddpx
