#include "output_watch.h"

#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace ddpx {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Owned by the hook on the output's node, so that it dies with the node.
class WatchedOutput {
 public:
  explicit WatchedOutput(Node* node) : node_(node) {}

  void reach() {
    reached_ = true;
  }
  bool reached() const {
    return reached_;
  }
  Node* node() const {
    return node_;
  }

 private:
  Node* node_;
  std::atomic<bool> reached_{false};
};

namespace {

class OutputHook final : public torch::autograd::FunctionPreHook {
 public:
  OutputHook(std::shared_ptr<WatchedOutput> output, std::weak_ptr<GraphTaskObserver> observer)
      : output_(std::move(output)), observer_(std::move(observer)) {}

  variable_list operator()(const variable_list& grads) override {
    if (const auto observer = observer_.lock()) {
      output_->reach();
      observer->on_output_grad();
    }
    return grads;
  }

 private:
  std::shared_ptr<WatchedOutput> output_;
  std::weak_ptr<GraphTaskObserver> observer_;
};

}  // namespace

void OutputWatch::watch(
    const std::vector<at::Tensor>& outputs, const std::weak_ptr<GraphTaskObserver>& observer) {
  if (outputs_.size() >= prune_at_) {
    const auto done = [](const auto& weak) {
      const auto output = weak.lock();
      return !output || output->reached();
    };
    outputs_.erase(std::remove_if(outputs_.begin(), outputs_.end(), done), outputs_.end());
    prune_at_ = std::max<std::size_t>(64, 2 * outputs_.size());
  }
  for (const auto& output : outputs) {
    if (const auto& grad_fn = output.grad_fn()) {
      auto watched = std::make_shared<WatchedOutput>(grad_fn.get());
      outputs_.push_back(watched);
      grad_fn->add_pre_hook(std::make_unique<OutputHook>(std::move(watched), observer));
    }
  }
}

std::unordered_set<const Node*> OutputWatch::nodes_to_come() const {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> stack;
  for (const auto& weak : outputs_) {
    const auto output = weak.lock();
    if (output && !output->reached()) {
      stack.push_back(output->node());
    }
  }
  while (!stack.empty()) {
    const auto* node = stack.back();
    stack.pop_back();
    if (!seen.insert(node).second) {
      continue;
    }
    for (const auto& edge : node->next_edges()) {
      if (edge.function) {
        stack.push_back(edge.function.get());
      }
    }
  }
  return seen;
}

}  // namespace ddpx
