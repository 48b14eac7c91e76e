#include "arrival_tracker.h"

#include <algorithm>
#include <limits>

namespace ddpx {

ArrivalTracker::ArrivalTracker(std::size_t num_params, GraphMode mode)
    : mode_(mode), arrived_(num_params, 0), absent_(num_params, false) {}

void ArrivalTracker::begin(const std::vector<std::size_t>& absent) {
  std::fill(arrived_.begin(), arrived_.end(), 0);
  std::fill(absent_.begin(), absent_.end(), false);
  for (const auto param_index : absent) {
    absent_[param_index] = true;
  }
}

uint32_t ArrivalTracker::awaited(std::size_t param_index) const {
  if (absent_[param_index]) {
    return 0;
  }
  return learning() ? std::numeric_limits<uint32_t>::max() : expected_[param_index];
}

Arrival ArrivalTracker::arrive(std::size_t param_index) {
  const auto count = ++arrived_[param_index];
  if (absent_[param_index]) {
    return Arrival::kAbsent;
  }
  const auto needed = awaited(param_index);
  if (count == needed) {
    return Arrival::kFinal;
  }
  return count < needed ? Arrival::kPartial : Arrival::kRepeated;
}

std::vector<std::size_t> ArrivalTracker::unfinished() const {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < arrived_.size(); ++i) {
    if (arrived_[i] < awaited(i)) {
      indices.push_back(i);
    }
  }
  return indices;
}

std::vector<std::size_t> ArrivalTracker::missing() const {
  auto indices = unfinished();
  if (learning() || mode_ != GraphMode::kStatic) {
    const auto arrived = [this](std::size_t i) { return arrived_[i] > 0; };
    indices.erase(std::remove_if(indices.begin(), indices.end(), arrived), indices.end());
  }
  return indices;
}

void ArrivalTracker::end() {
  const bool first = learning();
  always_the_same_ = always_the_same_ && (first || arrived_ == last_arrived_);
  last_arrived_ = arrived_;
  if (first) {
    expected_.assign(arrived_.size(), mode_ == GraphMode::kStatic ? 0 : 1);
  }
  for (std::size_t i = 0; i < arrived_.size(); ++i) {
    if (first || mode_ != GraphMode::kStatic) {
      expected_[i] = std::max(expected_[i], arrived_[i]);
    }
    if (first && absent_[i]) {
      expected_[i] = std::max(expected_[i], 1U);  // frozen so far: nothing is known of it
    }
    if (first && expected_[i] == 0) {
      known_unused_.push_back(i);
    }
  }
}

}  // namespace ddpx
