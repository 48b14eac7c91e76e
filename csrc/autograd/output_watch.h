// The outputs of forward: a backward starts at an output.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../errors.h"
#include "abandonment.h"
#include "backward_scope.h"

namespace ddpx {

struct WatchedOutput;

// The watched outputs of one forward.
class WatchedForward {
 public:
  // Whether the forward has outputs, and no backward has reached any of them. A backward of
  // autograd.grad() counts if it records a graph.
  bool left_out() const;

  // Whether autograd.grad() has recorded a graph behind an output, and no backward has reached an
  // output. The backward of a penalty does not begin at an output.
  bool only_differentiated() const;

 private:
  friend class OutputWatch;

  std::vector<std::shared_ptr<WatchedOutput>> outputs_;
};

// The reducer owns this object, under its mutex.
class OutputWatch {
 public:
  // From now on observer->on_output_grad(forward) is called when a backward reaches one of
  // `outputs`, before the nodes behind the output run. Ignores tensors without history.
  WatchedForward watch(
      const std::vector<at::Tensor>& outputs,
      ForwardSync forward,
      const std::weak_ptr<GraphTaskObserver>& observer);

  // All nodes of the graph behind outputs that are alive and that no backward has reached. Walks
  // the graph.
  std::unordered_set<const torch::autograd::Node*> nodes_to_come() const;

  // The observer is about to be destroyed. A synchronized backward that reaches an output raises
  // the error.
  void abandon(UserError error) {
    abandonment_->set(std::move(error));
  }

 private:
  std::vector<std::weak_ptr<WatchedOutput>> outputs_;
  std::shared_ptr<Abandonment> abandonment_ = std::make_shared<Abandonment>();
  std::size_t prune_at_ = 64;  // number of outputs at which dead outputs are removed
};

}  // namespace ddpx
