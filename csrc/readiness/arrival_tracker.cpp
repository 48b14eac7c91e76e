#include "arrival_tracker.h"

#include <algorithm>
#include <limits>

namespace ddpx {

void ArrivalHistory::learn(const ArrivalTracker& step) {
  const bool first = learning();
  always_the_same_ = always_the_same_ && (first || step.arrived_ == last_arrived_);
  last_arrived_ = step.arrived_;
  if (first) {
    expected_.assign(num_params_, mode_ == GraphMode::kStatic ? 0 : 1);
  }
  for (std::size_t i = 0; i < num_params_; ++i) {
    if (first || mode_ != GraphMode::kStatic) {
      expected_[i] = std::max(expected_[i], step.arrived_[i]);
    }
    if (first && step.expectations_[i] == ArrivalTracker::Expectation::kFrozen) {
      expected_[i] = std::max(expected_[i], 1U);  // a frozen param teaches nothing
    }
    if (first && expected_[i] == 0) {
      known_unused_.push_back(i);
    }
  }
}

ArrivalTracker::ArrivalTracker(
    const ArrivalHistory& history,
    const std::vector<std::size_t>& frozen,
    const std::vector<std::size_t>& unused)
    : history_(history),
      arrived_(history.num_params_, 0),
      expectations_(history.num_params_, Expectation::kGradient) {
  if (!history_.learning()) {
    for (const auto param_index : unused) {
      expectations_[param_index] = Expectation::kUnused;
    }
  }
  for (const auto param_index : frozen) {
    expectations_[param_index] = Expectation::kFrozen;
  }
}

uint32_t ArrivalTracker::awaited(std::size_t param_index) const {
  if (expectations_[param_index] != Expectation::kGradient) {
    return 0;
  }
  return history_.learning() ? std::numeric_limits<uint32_t>::max()
                             : history_.expected_[param_index];
}

Arrival ArrivalTracker::arrive(std::size_t param_index) {
  const auto count = ++arrived_[param_index];
  if (expectations_[param_index] == Expectation::kFrozen) {
    return Arrival::kFrozen;
  }
  if (expectations_[param_index] == Expectation::kUnused) {
    return Arrival::kUnforeseen;
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
  if (history_.learning() || history_.mode_ != GraphMode::kStatic) {
    std::erase_if(indices, [this](std::size_t i) { return arrived_[i] > 0; });
  }
  return indices;
}

std::vector<std::size_t> ArrivalTracker::unused() const {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < expectations_.size(); ++i) {
    if (expectations_[i] == Expectation::kUnused) {
      indices.push_back(i);
    }
  }
  return indices;
}

}  // namespace ddpx
