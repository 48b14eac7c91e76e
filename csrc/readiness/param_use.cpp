#include "param_use.h"

#include <algorithm>

namespace ddpx {

bool ParamUse::predicts_unused(const BucketSpec& bucket) const {
  if (unused_by_all.empty()) {
    return false;
  }
  return std::all_of(
      bucket.param_indices.begin(), bucket.param_indices.end(), [this](std::size_t i) {
        return std::binary_search(unused_by_all.begin(), unused_by_all.end(), i);
      });
}

void ParamUse::forget(c10::Device device) {
  map = UsedMap(prediction.num_params(), device);
  last_sums = {};
  unused_by_all.clear();
}

}  // namespace ddpx
