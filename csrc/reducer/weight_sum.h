// The sum of the weights of all ranks, in one step.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>

#include "../buckets/stream_set.h"
#include "../comm/collective.h"
#include "step_errors.h"

namespace ddpx {

// The sum of an earlier step, on its way from the device to the host.
class UnreadWeights {
 public:
  // Starts to copy the weight of this rank, and the sum. `where`: the step of the sum.
  UnreadWeights(const at::Tensor& own, const at::Tensor& sum, const errors::Where& where);

  // Waits for the copy. The error of a sum that is not positive.
  std::optional<UserError> error() const;

 private:
  at::Tensor copied_;  // pinned: the weight of this rank, and the sum
  c10::Event arrived_;
  errors::Where where_;
};

// One element travels before the first bucket. The host reads the sum only where the host waits for
// the buckets anyway: on CPU.
//
// A step owns the sum, under the mutex of the reducer; wait() may run without the mutex.
class WeightSum {
 public:
  // `own`: the weight of this rank, a float64 tensor with one element that nothing else uses.
  explicit WeightSum(at::Tensor own);

  // Starts the all-reduce.
  void launch(Collective& collective);
  bool launched() const {
    return work_ != nullptr || divisor_.defined();
  }

  // Waits for the all-reduce: on a device, by making the current stream wait. Without effect in a
  // second call.
  void wait(Collective& collective);

  // After wait(): a float64 tensor with one element, NaN if the sum is not positive.
  const at::Tensor& divisor() const {
    return divisor_;
  }

  // After wait(), on CPU: the error of a sum that is not positive.
  std::optional<UserError> error(const errors::Where& where) const;

  // After wait(), on a device: as error(), for a later step. nullopt if the wait is not over, or on
  // CPU.
  std::optional<UnreadWeights> unread(const errors::Where& where) const;

 private:
  at::Tensor own_;
  at::Tensor sum_;
  StreamSet streams_;  // that computed `own_`
  Collective::Work work_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  at::Tensor divisor_;
};

}  // namespace ddpx
