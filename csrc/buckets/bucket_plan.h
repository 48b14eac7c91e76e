// Assigns each gradient to a bucket: a pure, immutable value, validated once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddpx {

// The properties of a param that matter for the plan.
struct ParamMeta {
  static ParamMeta of(const at::Tensor& param, bool expect_sparse);

  int64_t numel;
  int64_t element_bytes;
  c10::ScalarType dtype;
  c10::Device device;
  bool expect_sparse;
  bool delayed = false;  // only shares buckets with delayed params; these buckets have no cap
};

// Caps in bytes. The param that makes a bucket reach its cap is the last param of the bucket, so a
// bucket may exceed its cap.
struct BucketCaps {
  int64_t first_bytes;  // the first bucket, smaller so that communication starts early
  int64_t cap_bytes;    // every other bucket
  std::vector<int64_t> listed_bytes;  // if not empty: one cap per bucket; the last cap repeats
};

// The assumption of the reducer about the autograd graph from step to step.
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

  // By the order in which gradients arrived, a permutation of the param indices.
  static BucketPlan by_arrival(
      const std::vector<ParamMeta>& params,
      const BucketCaps& caps,
      const std::vector<std::size_t>& arrival_order);

  // With these buckets of param indices, in this order.
  static BucketPlan listed(
      const std::vector<ParamMeta>& params, std::vector<std::vector<std::size_t>> buckets);

  // The same buckets, with the buckets of delayed params directly behind the bucket of `trigger`.
  BucketPlan delayed_behind(const std::vector<ParamMeta>& params, std::size_t trigger) const;

  const std::vector<BucketSpec>& buckets() const {
    return buckets_;
  }
  const SlotLocation& location(std::size_t param_index) const {
    return locations_[param_index];
  }

 private:
  BucketPlan(const std::vector<ParamMeta>& params, std::vector<BucketSpec> buckets);

  std::vector<BucketSpec> buckets_;
  std::vector<SlotLocation> locations_;
};

}  // namespace ddpx
