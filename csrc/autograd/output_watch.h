// The outputs of forward: where a backward starts, and which of them have not been through one.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <unordered_set>
#include <vector>

#include "backward_scope.h"

namespace ddpx {

class WatchedOutput;

// Not thread-safe: the reducer's mutex guards it.
class OutputWatch {
 public:
  // From here on observer->on_output_grad(forward) is called when a backward reaches one of
  // `outputs`, before anything upstream of it runs. Nothing for a tensor without history.
  void watch(
      const std::vector<at::Tensor>& outputs,
      ForwardSync forward,
      const std::weak_ptr<GraphTaskObserver>& observer);

  // Every node of the graph behind outputs that are still alive and have not been through a
  // backward. Walks that graph.
  std::unordered_set<const torch::autograd::Node*> nodes_to_come() const;

 private:
  std::vector<std::weak_ptr<WatchedOutput>> outputs_;
  std::size_t prune_at_ = 64;  // number of outputs at which the dead ones are forgotten
};

}  // namespace ddpx
