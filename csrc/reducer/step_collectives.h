// The collective calls of one step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../buckets/bucket.h"
#include "../observe/finite_check.h"
#include "context.h"

namespace ddpx {

// All ranks make the same calls in the same order: the sum of weights, the buckets in plan order,
// the exchange of the use of params, the buckets that were predicted to be unused and are used by
// some rank, and the check for finite gradients. A call is made only where the settings need it.
//
// Owned by a step, which has the buckets and knows when they are ready. Every method needs the
// mutex of the context, and releases the mutex while it waits.
class StepCollectives {
 public:
  // `context` must outlive the calls. `weight`: of this rank, for averages by weight.
  StepCollectives(ReducerContext& context, std::optional<WeightSum> weight);

  // Whether the bucket is launched at the end of the step, and only if some rank used it.
  bool predicted_unused(std::size_t bucket_index) const {
    return unused_[bucket_index];
  }

  // Launches the reduction of `bucket`, or calls the communication hook. `bucket` has the gradients
  // of the bucket with this index.
  void launch(std::size_t bucket_index, Bucket& bucket);

  // Waits for the reduction of `bucket`, and makes the average of it.
  void wait(std::size_t bucket_index, Bucket& bucket);

  // After all buckets: the error of weights without an average. On a device, this is the error of
  // the last step, because the host does not wait for the sum of this step. The check for finite
  // gradients waits anyway.
  std::optional<UserError> weight_error();

  // Launches the exchange of the use of params, if the step needs it.
  void exchange_use();

  // Per param, the number of ranks that used it. Waits for the exchange.
  const std::vector<int32_t>& num_ranks_using();

  // The buckets that were predicted to be unused, and of which some rank used a param. These
  // buckets are not predicted to be unused any more.
  std::vector<std::size_t> take_mispredicted();

  // After all buckets. Learns from the exchange which params are unused for long.
  void learn_use();

  // The check for finite gradients; null if it is off.
  FiniteCheck* finite_check() {
    return finite_check_ ? &*finite_check_ : nullptr;
  }
  void launch_finite_check();
  // Waits for the check. The error of gradients that are not finite, on any rank.
  std::optional<UserError> finite_error();

 private:
  void divide(Bucket& bucket);

  ReducerContext& context_;
  std::vector<bool> unused_;          // per bucket
  std::optional<WeightSum> weights_;  // for averages by weight
  std::optional<FiniteCheck> finite_check_;
};

}  // namespace ddpx
