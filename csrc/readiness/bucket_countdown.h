// How many gradients each bucket of a step still waits for.
#pragma once

#include <cstddef>
#include <vector>

#include "../buckets/bucket_plan.h"

namespace ddpx {

// The step owns the countdown, under the mutex of the reducer.
class BucketCountdown {
 public:
  // Each bucket waits for one gradient per param. A bucket in `delayed` waits for one thing more:
  // the gradient of the delay trigger, which lies in another bucket.
  BucketCountdown(const BucketPlan& plan, const std::vector<std::size_t>& delayed);

  // One of the gradients that the bucket waits for is ready. Returns true if that was the last one.
  // Throws InternalError if the bucket waited for nothing.
  bool count_down(std::size_t bucket_index);

 private:
  std::vector<std::size_t> outstanding_;  // per bucket
};

}  // namespace ddpx
