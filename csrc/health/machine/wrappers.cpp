#include "wrappers.h"

#include <utility>

#include "names.h"

namespace ddpx::health {
namespace {

constexpr std::size_t kMostNames = 4;

}  // namespace

void Wrappers::begin_construction() {
  const auto number = ++num_constructions_;
  page_.note({.doing = Doing::kConstructing, .model = kNoModel, .step = number});
}

// A rank that has begun fewer calls than another rank is behind that rank.
void Wrappers::begin_call() {
  auto activity = page_.view().activity();
  if (activity.doing == Doing::kConstructing) {
    activity.doing = Doing::kConstruction;
    ++activity.bucket;
    page_.note(activity);
  }
}

void Wrappers::end_call() {
  if (page_.view().activity().doing == Doing::kConstruction) {
    note(Doing::kConstructing);
  }
}

void Wrappers::note(Doing doing) {
  auto activity = page_.view().activity();
  activity.doing = doing;
  page_.note(activity);
}

void Wrappers::set_missing_params(uint8_t model, MissingParams missing_params) {
  const std::lock_guard<std::mutex> lock(mutex_);
  missing_params_[model] = std::move(missing_params);
}

std::string Wrappers::describe_missing(const Activity& own) const {
  if (own.doing != Doing::kBackward || now_ns() - own.since_ns <= times::kMissingGradients) {
    return {};
  }
  MissingParams missing_params;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = missing_params_.find(own.model);
    missing_params = found == missing_params_.end() ? nullptr : found->second;
  }
  const auto missing = missing_params ? missing_params() : std::vector<std::string>();
  return missing.empty() ? "" : "without gradients yet for " + join_names(missing, kMostNames);
}

}  // namespace ddpx::health
