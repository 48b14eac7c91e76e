#include "names.h"

#include <sstream>
#include <utility>

namespace ddpx::health {

std::string join_names(const std::vector<std::string>& names, std::size_t most) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < most; ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  if (names.size() > most) {
    text += " and " + std::to_string(names.size() - most) + " more";
  }
  return text;
}

std::string in_seconds(int64_t ns) {
  std::ostringstream out;
  out.precision(ns < 10'000'000'000 ? 2 : ns < 100'000'000'000 ? 1 : 0);
  out << std::fixed << static_cast<double>(ns) / 1e9;
  return out.str();
}

void BucketNames::set(uint8_t model, std::vector<std::vector<std::string>> names) {
  const std::lock_guard<std::mutex> lock(mutex_);
  names_[model] = std::move(names);
}

void BucketNames::set_all_params(uint8_t model, std::vector<std::string> names) {
  const std::lock_guard<std::mutex> lock(mutex_);
  all_params_[model] = std::move(names);
}

std::vector<std::string> BucketNames::all_params(uint8_t model) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = all_params_.find(model);
  return found == all_params_.end() ? std::vector<std::string>() : found->second;
}

std::vector<std::string> BucketNames::params(uint8_t model, uint16_t bucket) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = names_.find(model);
  const bool is_known = found != names_.end() && bucket < found->second.size();
  return is_known ? found->second[bucket] : std::vector<std::string>();
}

std::string BucketNames::describe(const Activity& activity) const {
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
  } else if (activity.model > 0) {
    out << " of wrapper " << int{activity.model};
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
