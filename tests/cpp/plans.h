// Bucket plans as tests compare them.
#pragma once

#include <cstddef>
#include <cstdint>
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

// Buckets of so many params of one byte each, in registration order.
inline BucketPlan plan_of(const std::vector<int64_t>& bucket_sizes) {
  std::vector<ParamMeta> metas;
  Indices order;
  for (const auto size : bucket_sizes) {
    for (int64_t i = 0; i < size; ++i) {
      order.push_back(metas.size());
      metas.push_back({1, 1, c10::kByte, c10::kCPU, /*expect_sparse=*/false});
    }
  }
  return BucketPlan::by_arrival(metas, BucketCaps{1, 1, bucket_sizes}, order);
}

}  // namespace ddpx
