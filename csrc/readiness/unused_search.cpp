#include "unused_search.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <unordered_set>

#include "../autograd/backward_scope.h"

namespace ddpx {
namespace {

using torch::autograd::Node;

// The graph task on this thread. One object serves the lookups of all params.
class RunningTask {
 public:
  RunningTask()
      : asked_for_(torch::autograd::get_current_graph_task_exec_info()),
        nodes_(torch::autograd::get_current_graph_task_nodes_in_graph()),
        current_(torch::autograd::get_current_node().get()) {}

  // Whether the task runs the accumulator of this hook, or has run it.
  bool reaches(const GradHook& hook) const {
    auto* const node = const_cast<Node*>(hook.accumulator());
    if (node == current_) {  // the list lacks the root of the task
      return true;
    }
    if (asked_for_ != nullptr && !asked_for_->empty()) {  // not the whole graph
      const auto entry = asked_for_->find(node);
      return entry != asked_for_->end() && entry->second.needed_;
    }
    return nodes_ == nullptr || nodes_->count(node) != 0;
  }

 private:
  decltype(torch::autograd::get_current_graph_task_exec_info()) asked_for_;
  const std::unordered_set<Node*>* nodes_;
  const Node* current_;
};

}  // namespace

void UnusedSearch::look(const std::vector<GradHook>& hooks) {
  const RunningTask task;
  for (std::size_t i = 0; i < hooks.size(); ++i) {
    unreached_[i] = !task.reaches(hooks[i]);
  }
  ++num_looks_;
  task_id_ = torch::autograd::get_current_graph_task_id();
  task_is_outermost_ = BackwardScope::current_depth() == 0;
}

void UnusedSearch::note_arrival(std::size_t param_index) {
  if (task_id_ == kNoTask) {
    return;
  }
  const bool in_that_task = torch::autograd::get_current_graph_task_id() == task_id_;
  if (!in_that_task && task_is_outermost_ && BackwardScope::current_depth() == 0) {
    several_threads_ = true;
  } else if (unreached_[param_index] || !in_that_task || !task_is_outermost_) {
    learn_nested(param_index);
  } else {
    direct_in_[param_index] = num_looks_;
  }
}

void UnusedSearch::note_local_arrival(std::size_t param_index) {
  if (BackwardScope::current_depth() > 0) {
    learn_nested(param_index);
  }
}

void UnusedSearch::note_peers(
    const std::vector<int32_t>& users, const std::vector<int32_t>& nesting) {
  for (std::size_t i = 0; i < users.size(); ++i) {
    if (nesting[i] != 0) {
      learn_nested(i);
    } else if (users[i] != 0) {
      direct_in_[i] = num_looks_;
    }
  }
}

std::vector<std::size_t> UnusedSearch::unused() const {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; !several_threads_ && i < unreached_.size(); ++i) {
    const bool may_nest = nested_[i] || (nested_since_ && direct_in_[i] < *nested_since_);
    if (unreached_[i] && !may_nest) {
      indices.push_back(i);
    }
  }
  return indices;
}

bool UnusedSearch::reaches_nothing() const {
  return !nested_since_ && !several_threads_ &&
         std::find(unreached_.begin(), unreached_.end(), false) == unreached_.end();
}

std::vector<std::size_t> UnusedSearch::nested() const {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; nested_since_ && i < nested_.size(); ++i) {
    if (nested_[i]) {
      indices.push_back(i);
    }
  }
  return indices;
}

void UnusedSearch::learn_nested(std::size_t param_index) {
  nested_[param_index] = true;
  if (!nested_since_) {
    nested_since_ = num_looks_;
  }
}

}  // namespace ddpx
