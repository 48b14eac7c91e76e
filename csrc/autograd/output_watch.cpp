#include "output_watch.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <utility>

#include "node_hook.h"
#include "running_task.h"

namespace ddpx {

using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

// The type of the pointer that owns a node changed between torch releases.
using NodePtr = std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())>;

template <typename T>
std::weak_ptr<T> weak_from(const std::shared_ptr<T>& owner) {
  return owner;
}

template <typename T>
c10::weak_intrusive_ptr<T> weak_from(const c10::intrusive_ptr<T>& owner) {
  return c10::weak_intrusive_ptr<T>(owner);
}

using WeakNodePtr = decltype(weak_from(std::declval<NodePtr>()));

}  // namespace

// The hook on the output's node owns this object, so that both die with the node.
struct WatchedOutput {
  explicit WatchedOutput(const NodePtr& output_node) : node(weak_from(output_node)) {}

  const WeakNodePtr node;
  std::atomic<bool> reached{false};
  // Also by autograd.grad(create_graph=True), whose result may be a part of a loss.
  std::atomic<bool> used{false};
};

namespace {

class OutputHook final : public NodeHook<torch::autograd::FunctionPreHook> {
 public:
  OutputHook(
      std::shared_ptr<WatchedOutput> output,
      ForwardSync forward,
      std::weak_ptr<GraphTaskObserver> observer,
      std::shared_ptr<const Abandonment> abandonment)
      : output_(std::move(output)),
        forward_(forward),
        observer_(std::move(observer)),
        abandonment_(std::move(abandonment)) {}

  variable_list operator()(const variable_list& grads) override {
    if (const auto observer = observer_.lock()) {
      if (!running_task::returns_grads()) {  // the output keeps its backward
        output_->reached = true;
        output_->used = true;
      } else if (at::GradMode::is_enabled()) {
        output_->used = true;
      }
      observer->on_output_grad(forward_);
    } else if (forward_ == ForwardSync::kOn && !running_task::returns_grads()) {
      abandonment_->raise();
    }
    return grads;
  }

 private:
  std::shared_ptr<WatchedOutput> output_;
  ForwardSync forward_;
  std::weak_ptr<GraphTaskObserver> observer_;
  std::shared_ptr<const Abandonment> abandonment_;
};

}  // namespace

bool WatchedForward::left_out() const {
  const auto used = [](const auto& output) { return output->used.load(); };
  return !outputs_.empty() && std::none_of(outputs_.begin(), outputs_.end(), used);
}

bool WatchedForward::only_differentiated() const {
  const auto reached = [](const auto& output) { return output->reached.load(); };
  return !outputs_.empty() && !left_out() &&
         std::none_of(outputs_.begin(), outputs_.end(), reached);
}

WatchedForward OutputWatch::watch(
    const std::vector<at::Tensor>& outputs,
    ForwardSync forward,
    const std::weak_ptr<GraphTaskObserver>& observer) {
  if (outputs_.size() >= prune_at_) {
    std::erase_if(outputs_, [](const auto& output) { return output.expired(); });
    prune_at_ = std::max<std::size_t>(64, 2 * outputs_.size());
  }
  WatchedForward watched_forward;
  std::unordered_set<const Node*> nodes;  // a node has one hook, also if it makes many outputs
  for (const auto& output : outputs) {
    if (const auto& grad_fn = output.grad_fn(); grad_fn && nodes.insert(grad_fn.get()).second) {
      auto watched = std::make_shared<WatchedOutput>(grad_fn);
      outputs_.push_back(watched);
      watched_forward.outputs_.push_back(watched);
      grad_fn->add_pre_hook(
          std::make_unique<OutputHook>(std::move(watched), forward, observer, abandonment_));
    }
  }
  return watched_forward;
}

std::unordered_set<const Node*> OutputWatch::nodes_to_come() const {
  std::unordered_set<const Node*> seen;
  std::vector<NodePtr> roots;  // other threads may release the graphs during the walk
  std::vector<const Node*> stack;
  for (const auto& weak : outputs_) {
    const auto output = weak.lock();
    if (output && !output->reached) {
      if (auto node = output->node.lock()) {  // null if the node is being destroyed
        stack.push_back(node.get());
        roots.push_back(std::move(node));
      }
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
