// The knowledge of this rank about the use of params, from step to step.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../buckets/bucket_plan.h"
#include "unused_prediction.h"
#include "used_map.h"

namespace ddpx {

// The last steps in a row in which no rank used a param. The next step is predicted to leave the
// param unused after `needed_` such steps. Each wrong prediction doubles that number: a param whose
// use varies is soon not predicted any more, and a param that falls out of use is predicted again.
class UnusedStreak {
 public:
  bool predicts_unused() const {
    return length_ >= needed_;
  }

  // A step has ended. `used`: some rank used the param.
  void learn(bool used);

 private:
  uint32_t length_ = 0;
  uint32_t needed_ = 1;
};

// The reducer owns this object, under its mutex.
struct ParamUse {
  ParamUse(std::size_t num_params, c10::Device device)
      : map(num_params, device), prediction(num_params), unused_streaks(num_params) {}

  // Whether this step is predicted to leave all params of the bucket unused on all ranks. The same
  // on all ranks. Such a bucket is not launched.
  bool predicts_unused(const BucketSpec& bucket) const;

  // Forgets what ranks exchanged, and what this rank marked. The prediction stays.
  void forget(c10::Device device);

  UsedMap map;
  UsedMap::Sums last_sums;  // a copy, since `map` changes without the mutex during an exchange
  UnusedPrediction prediction;
  std::vector<UnusedStreak> unused_streaks;  // per param; learns with skip_unused_buckets only
  bool static_use_known = false;             // in a static graph, after the first step
};

}  // namespace ddpx
