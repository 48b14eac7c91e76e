#include "names.h"

#include <sstream>
#include <utility>

namespace ddpx::health {

std::string in_seconds(int64_t ns) {
  std::ostringstream out;
  out.precision(ns < 10'000'000'000 ? 2 : ns < 100'000'000'000 ? 1 : 0);
  out << std::fixed << static_cast<double>(ns) / 1e9;
  return out.str();
}

std::string of_wrapper(uint8_t model) {
  return model > 0 && model < kNumModels ? " of wrapper " + std::to_string(model) : std::string();
}

void WrapperNames::set(uint8_t model, Names names) {
  const std::lock_guard<std::mutex> lock(mutex_);
  by_model_[model] = std::move(names);
}

std::vector<std::string> WrapperNames::params(uint8_t model) const {
  return find(model, &Names::params);
}

std::vector<std::string> WrapperNames::params(uint8_t model, uint16_t bucket) const {
  const auto buckets = find(model, &Names::buckets);
  return bucket < buckets.size() ? buckets[bucket] : std::vector<std::string>();
}

std::string WrapperNames::describe_missing(const Activity& own) const {
  if (own.doing != Doing::kBackward || now_ns() - own.since_ns <= times::kMissingGradients) {
    return {};
  }
  constexpr std::size_t kMost = 4;
  const auto missing_params = find(own.model, &Names::missing_params);
  const auto missing = missing_params ? missing_params() : std::vector<std::string>();
  return missing.empty() ? "" : "without gradients yet for " + join_names(missing, kMost);
}

std::string WrapperNames::describe(const Activity& activity) const {
  if (activity.doing == Doing::kConstructing || activity.doing == Doing::kConstruction) {
    return "construction of the wrapper";
  }
  if (activity.model == kNoModel) {
    return activity.step == 0 ? "user code, before its first step"
                              : "user code, after construction of the wrapper";
  }
  std::ostringstream out;
  out << "step " << activity.step << ", phase " << to_string(activity.doing);
  if (activity.model == kNotNumbered) {
    out << " of a wrapper that has not communicated yet";
  } else if (activity.model >= kNumModels) {
    out << " of a copied wrapper, or one made without init_sync";
  } else {
    out << of_wrapper(activity.model);
  }
  if (is_about_a_bucket(activity.doing)) {
    constexpr std::size_t kMost = 4;
    const auto names = params(activity.model, activity.bucket);
    out << ", bucket " << activity.bucket;
    if (!names.empty()) {
      out << " (" << join_names(names, kMost) << ")";
    }
  }
  return out.str();
}

}  // namespace ddpx::health
