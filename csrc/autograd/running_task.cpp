#include "running_task.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstddef>
#include <unordered_set>

namespace ddpx::running_task {

using torch::autograd::GraphTask;
using torch::autograd::Node;

namespace {

// Torch exports the address of a member of the task, but not the task.
const GraphTask* this_task() {
  const auto* member = torch::autograd::get_current_graph_task_exec_info();
  if (member == nullptr) {
    return nullptr;
  }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr auto offset = offsetof(GraphTask, exec_info_);
#pragma GCC diagnostic pop
  const auto* address = reinterpret_cast<const char*>(member) - offset;
  return reinterpret_cast<const GraphTask*>(address);
}

}  // namespace

bool in_backward() {
  return id() != -1;
}

int id() {
  return torch::autograd::get_current_graph_task_id();
}

int depth() {
  const auto* task = this_task();
  return task == nullptr ? 0 : task->reentrant_depth_;
}

const std::atomic_bool* has_raised() {
  const auto* task = this_task();
  return task == nullptr ? nullptr : &task->has_error_;
}

c10::weak_intrusive_ptr<c10::ivalue::Future> result() {
  const auto* task = this_task();
  return c10::weak_intrusive_ptr<c10::ivalue::Future>(
      task == nullptr ? c10::intrusive_ptr<c10::ivalue::Future>() : task->future_result_);
}

bool is_nested() {
  return torch::autograd::get_current_node() || depth() > 0;
}

// Of torch's engines, only the one of torch.distributed.autograd makes tasks that end at the first
// error. Such a task captures the gradients of all leaves that it reaches.
bool is_distributed() {
  const auto* task = this_task();
  return task != nullptr && task->exit_on_error_;
}

bool runs_whole_graph() {
  const auto* asked_for = torch::autograd::get_current_graph_task_exec_info();
  return asked_for == nullptr || asked_for->empty() || is_distributed();
}

bool returns_grads() {
  const auto* task = this_task();
  return task != nullptr && !task->captured_vars_.empty() && !is_distributed();
}

bool returns_grad_of(const Node* node) {
  const auto* asked_for = torch::autograd::get_current_graph_task_exec_info();
  if (asked_for == nullptr) {
    return false;
  }
  auto* const key = const_cast<Node*>(node);
  const auto entry = asked_for->find(key);
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return entry != asked_for->end() && entry->second.captures_ != nullptr &&
         (nodes == nullptr || nodes->count(key) != 0);
}

std::vector<bool> unreached(const std::vector<GradHook>& hooks) {
  const auto* asked_for = torch::autograd::get_current_graph_task_exec_info();
  const std::unordered_set<Node*>* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const Node* root = torch::autograd::get_current_node().get();  // the list lacks the root
  const auto reaches = [&](const GradHook& hook) {
    auto* const node = const_cast<Node*>(hook.accumulator());
    if (node == root) {
      return true;
    }
    if (asked_for != nullptr && !asked_for->empty()) {
      const auto entry = asked_for->find(node);
      return entry != asked_for->end() && entry->second.should_execute();
    }
    return nodes == nullptr || nodes->count(node) != 0;
  };
  std::vector<bool> unreached;
  unreached.reserve(hooks.size());
  for (const auto& hook : hooks) {
    unreached.push_back(!reaches(hook));
  }
  return unreached;
}

}  // namespace ddpx::running_task
