// Which gradient lies in which bucket: a pure, immutable value, validated once.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddpx {

// What the plan needs to know of a param.
struct ParamMeta {
  int64_t numel;
  int64_t element_bytes;
  c10::ScalarType dtype;
  c10::Device device;
  bool expect_sparse;
  bool delayed = false;  // shares buckets with other delayed params only, which have no cap
};

// Caps in bytes. A bucket is closed by the param that makes it reach its cap, so it may exceed it.
struct BucketCaps {
  int64_t first_bytes;  // the first bucket, smaller so that communication starts early
  int64_t cap_bytes;    // every other bucket
  std::vector<int64_t> listed_bytes;  // if not empty: caps bucket by bucket, the last one repeats
};

// What the reducer may assume of the autograd graph from step to step.
enum class GraphMode { kDefault, kFindUnused, kStatic };

struct BucketSpec {
  std::vector<std::size_t> param_indices;
};

struct SlotLocation {
  std::size_t bucket_index;
  std::size_t slot_index;
};

// Buckets stand in launch order. Invariants, checked on construction: each param lies in exactly
// one bucket; no bucket is empty; a bucket has one dtype and device; a sparse param is alone;
// delayed params are apart from the others.
class BucketPlan {
 public:
  // Before any backward: registration order reversed, as a guess at arrival order. One bucket per
  // dtype and device unless the mode or listed caps ask for a split.
  static BucketPlan initial(
      const std::vector<ParamMeta>& params, const BucketCaps& caps, GraphMode mode);

  // From the order in which gradients arrived: a permutation of the param indices.
  static BucketPlan by_arrival(
      const std::vector<ParamMeta>& params,
      const BucketCaps& caps,
      const std::vector<std::size_t>& arrival_order);

  // The same buckets, those of delayed params directly behind the bucket of `gate`.
  BucketPlan delayed_behind(const std::vector<ParamMeta>& params, std::size_t gate) const;

  const std::vector<BucketSpec>& buckets() const {
    return buckets_;
  }
  const SlotLocation& location(std::size_t param_index) const {
    return locations_[param_index];
  }
  std::size_t num_params() const {
    return locations_.size();
  }

 private:
  BucketPlan(const std::vector<ParamMeta>& params, std::vector<BucketSpec> buckets);

  std::vector<BucketSpec> buckets_;
  std::vector<SlotLocation> locations_;
};

}  // namespace ddpx
