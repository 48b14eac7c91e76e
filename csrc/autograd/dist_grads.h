// The gradients of a backward of torch.distributed.autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torch::distributed::autograd {
class DistAutogradContext;
}

namespace ddpx {

// torch.distributed.autograd accumulates gradients in the map of a context, and leaves `param.grad`
// alone. During a step of such a backward, `param.grad` is the gradient in the map, so that the
// step finds gradients in their usual place.
// The reducer owns this object, under its mutex.
class DistGrads {
 public:
  // A step begins. Puts the present `param.grad` of all params aside.
  void begin(const std::vector<at::Tensor>& params);

  // Whether a step runs.
  bool active() const {
    return active_;
  }

  // On the thread on which a gradient of this backward arrives, before or after begin().
  void remember_context();

  // Sets `param.grad` to the gradient in the map. Without effect if the map has none.
  void pull(const at::Tensor& param);

  // Whether the map of the last context has gradients of these params that are not averaged yet. A
  // context that has ended has none.
  bool has_any(const std::vector<at::Tensor>& params) const;

  // Whether a step has averaged gradients in this context before.
  bool are_averages() const;

  // The step has ended, or has broken off. Restores the `param.grad` of begin(). With `averaged`,
  // the averages go into the map, also those of params that only other ranks used.
  void end(const std::vector<at::Tensor>& params, bool averaged);

 private:
  bool active_ = false;
  // The context of the last backward. Empty after its gradients were averaged.
  std::weak_ptr<torch::distributed::autograd::DistAutogradContext> context_;
  std::weak_ptr<torch::distributed::autograd::DistAutogradContext> averaged_;  // of the last step
  std::vector<at::Tensor> set_aside_;                                          // per param
};

}  // namespace ddpx
