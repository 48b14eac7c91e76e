// The bucket plan in force, and its buckets.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "bucket.h"
#include "bucket_plan.h"

namespace ddpx {

// Empty where no other rank exists and there is no communication hook: gradients are then final as
// they arrive, and nothing is copied.
// The reducer owns the set, under its mutex.
class BucketSet {
 public:
  explicit BucketSet(BucketPlan plan) : plan_(std::move(plan)) {}

  // Replaces the plan and the buckets. Streams may still use the old buckets.
  void install(BucketPlan plan, std::vector<Bucket> buckets);

  // To be called before the set is dropped, if streams may still use its buckets.
  void keep_for_streams() const;

  // Drops the memory of all dense buckets.
  void free_memory();

  // Gives each gradient that lies in a bucket memory of its own, with its present value.
  void move_out_grads(const std::vector<at::Tensor>& params);

  // Moves each present gradient that fits into its slot, if the bucket has memory.
  void take_grads(const std::vector<at::Tensor>& params);

  const BucketPlan& plan() const {
    return plan_;
  }
  std::size_t size() const {
    return buckets_.size();
  }
  Bucket& operator[](std::size_t bucket_index) {
    return buckets_[bucket_index];
  }
  Bucket& of(std::size_t param_index) {
    return buckets_[plan_.location(param_index).bucket_index];
  }
  const Slot& slot_of(std::size_t param_index) {
    return of(param_index).slots()[plan_.location(param_index).slot_index];
  }

  // The current stream of each device waits for all gradients that have arrived. Autograd does this
  // at the end of a backward, but not within a backward, nor after a backward that raised.
  void wait_for_streams();
  // A backward has ended without an error.
  void forget_streams();

  // The step has broken off. Peers may still write into a bucket in flight, so a gradient that lies
  // there becomes zeros in other memory.
  void clear_in_flight(const std::vector<at::Tensor>& params);

  // A captured step has failed.
  void drop_captured();

 private:
  BucketPlan plan_;
  std::vector<Bucket> buckets_;
};

}  // namespace ddpx
