// Checks of the gradients that accumulate between averaged backwards, for averages other than the
// mean.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "../autograd/dist_grads.h"
#include "context.h"

namespace ddpx {

// Detects gradients that the script has not cleared. A sum over ranks is wrong if it contains the
// averages of an earlier step, or gradients of forwards whose weights are forgotten. So the script
// clears the gradients after each averaged backward, and after it has given up forwards.
//
// The reducer owns this object. Every method needs the mutex of the context.
class AccumulatedGrads {
 public:
  // Both must outlive this object.
  AccumulatedGrads(ReducerContext& context, const DistGrads& dist_grads)
      : context_(context), dist_grads_(dist_grads) {}

  // The weight of the next forward, for averages by weight: a number that is 0 or more, or a tensor
  // with one element.
  void set_weight(double number);
  void set_weight(const at::Tensor& tensor);

  // A forward has ended, and takes the weight that was set.
  void count_weight(WatchedForward forward);

  // To be called before the first gradient of the first backward after a step. Returns an error if
  // the script has not cleared the averages of that step. A later call then checks these
  // averages again. Without an error, no later call checks the averages of that step.
  std::optional<UserError> find_averages();

  // UserError if the context of torch.distributed.autograd in which a step begins has averages
  // already. To be called after DistGrads::remember_context().
  void check_dist_averages() const;

  // Forgets the weights of all forwards since the last step. The next averaged backward raises if
  // their gradients remain, also gradients of forwards that an earlier call has forgotten.
  void forget_weights();

  // Ends the loss of weights once the script has cleared the gradients.
  void end_loss_if_cleared();

 private:
  bool no_grads() const;
  bool grads_remain() const;
  void mark_grads_cleared();

  ReducerContext& context_;
  const DistGrads& dist_grads_;
};

}  // namespace ddpx
