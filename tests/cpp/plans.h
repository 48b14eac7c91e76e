// Bucket plans as tests compare them.
#pragma once

#include <cstddef>
#include <vector>

#include "buckets/bucket_plan.h"

namespace ddpx {

using Indices = std::vector<std::size_t>;
using Buckets = std::vector<Indices>;

inline Buckets buckets_of(const BucketPlan& plan) {
  Buckets buckets;
  for (const auto& bucket : plan.buckets()) {
    buckets.push_back(bucket.param_indices);
  }
  return buckets;
}

}  // namespace ddpx
