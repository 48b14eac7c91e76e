#include "bucket_countdown.h"

#include <string>

#include "../errors.h"

namespace ddpx {

BucketCountdown::BucketCountdown(const BucketPlan& plan, const std::vector<std::size_t>& delayed) {
  outstanding_.reserve(plan.buckets().size());
  for (const auto& bucket : plan.buckets()) {
    outstanding_.push_back(bucket.param_indices.size());
  }
  for (const auto bucket_index : delayed) {
    ++outstanding_[bucket_index];
  }
}

bool BucketCountdown::count_down(std::size_t bucket_index) {
  auto& outstanding = outstanding_.at(bucket_index);
  if (outstanding == 0) {
    throw InternalError(
        "bucket " + std::to_string(bucket_index) + " has all gradients, but got one more");
  }
  return --outstanding == 0;
}

}  // namespace ddpx
