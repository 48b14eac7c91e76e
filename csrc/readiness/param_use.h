// What this rank knows of the use of params from step to step.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <vector>

#include "../buckets/bucket_plan.h"
#include "unused_prediction.h"
#include "used_map.h"

namespace ddpx {

// The reducer owns this object, under its mutex.
struct ParamUse {
  ParamUse(std::size_t num_params, c10::Device device)
      : map(num_params, device), prediction(num_params) {}

  // Whether ranks exchange at the end of this step which params they used.
  bool exchanged(GraphMode mode) const {
    return mode == GraphMode::kFindUnused || (mode == GraphMode::kStatic && !static_use_known);
  }

  // Whether no rank used a param of this bucket in the last step. The same on all ranks. Such a
  // bucket is predicted to be unused, and is not launched.
  bool predicts_unused(const BucketSpec& bucket) const;

  // Forgets what ranks exchanged, and what this rank marked. The prediction stays.
  void forget(c10::Device device);

  UsedMap map;
  UsedMap::Sums last_sums;  // a copy, since `map` changes without the mutex during an exchange
  UnusedPrediction prediction;
  std::vector<std::size_t> unused_by_all;  // in the last step, ascending; skip_unused_buckets only
  bool static_use_known = false;           // in a static graph, after the first step
};

}  // namespace ddpx
