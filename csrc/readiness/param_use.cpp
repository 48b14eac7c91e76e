#include "param_use.h"

#include <algorithm>

namespace ddpx {

void UnusedStreak::learn(bool used) {
  constexpr uint32_t kMax = 1U << 20;
  if (!used) {
    length_ = std::min(length_ + 1, kMax);
    return;
  }
  if (predicts_unused()) {
    needed_ = std::min(2 * needed_, kMax);
  }
  length_ = 0;
}

bool ParamUse::predicts_unused(const BucketSpec& bucket) const {
  return std::all_of(
      bucket.param_indices.begin(), bucket.param_indices.end(), [this](std::size_t i) {
        return unused_streaks[i].predicts_unused();
      });
}

void ParamUse::forget(c10::Device device) {
  map = UsedMap(prediction.num_params(), device);
  last_sums = {};
  unused_streaks.assign(prediction.num_params(), {});
}

}  // namespace ddpx
