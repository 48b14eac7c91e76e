// What buckets and activities are called in texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "activity.h"

namespace ddpx::health {

// "'a', 'b' and 3 more".
std::string join_names(const std::vector<std::string>& names, std::size_t most);

// "0.25", "12.3": seconds, in two or three digits.
std::string in_seconds(int64_t ns);

// The params of each bucket of each wrapper. Ranks have the same, so that a rank can name what
// another one does. Thread-safe.
class BucketNames {
 public:
  void set(uint8_t model, std::vector<std::vector<std::string>> names);

  std::vector<std::string> params(uint8_t model, uint16_t bucket) const;

  // "step 3, phase waiting for buckets, bucket 1 ('a', 'b')".
  std::string describe(const Activity& activity) const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::vector<std::vector<std::string>>> names_;  // by model, bucket
};

}  // namespace ddpx::health
