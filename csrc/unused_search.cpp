#include "unused_search.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <typeinfo>
#include <unordered_set>

namespace ddpx {
namespace {

using torch::autograd::Node;

// The node of a torch.autograd.Function that is written in Python. Its header is one of torch's
// Python headers, which the core does not include, so the type is known by its mangled name.
bool is_python_function(const Node& node) {
  return std::strcmp(typeid(node).name(), "N5torch8autograd6PyNodeE") == 0;
}

// Reentrant checkpoints of torch, DeepSpeed, Megatron and FairScale have this name in common.
bool starts_a_task(const Node& node) {
  return is_python_function(node) && node.name().find("Checkpoint") != std::string::npos;
}

// The graph task on this thread, asked once for what is looked up for each param.
class RunningTask {
 public:
  RunningTask()
      : asked_for_(torch::autograd::get_current_graph_task_exec_info()),
        nodes_(torch::autograd::get_current_graph_task_nodes_in_graph()) {}

  // Whether the task runs the accumulator of this hook, or has run it.
  bool reaches(const GradHook& hook) const {
    auto* const node = const_cast<Node*>(hook.accumulator());
    if (asked_for_ != nullptr && !asked_for_->empty()) {  // not the whole graph
      const auto entry = asked_for_->find(node);
      return entry != asked_for_->end() && entry->second.needed_;
    }
    return nodes_ == nullptr || nodes_->count(node) != 0;
  }

 private:
  decltype(torch::autograd::get_current_graph_task_exec_info()) asked_for_;
  const std::unordered_set<Node*>* nodes_;
};

}  // namespace

std::vector<std::size_t> UnusedSearch::begin_step(const std::vector<GradHook>& hooks) {
  std::vector<std::size_t> indices;
  if (nests_tasks_) {
    return indices;
  }
  const RunningTask task;
  bool same_params = true;
  for (std::size_t i = 0; i < hooks.size(); ++i) {
    const bool unreached = !task.reaches(hooks[i]);
    same_params = same_params && unreached == unreached_[i];
    unreached_[i] = unreached;
    if (unreached) {
      indices.push_back(i);
    }
  }
  if (!indices.empty() && may_nest_tasks(same_params)) {
    nests_tasks_ = true;
    indices.clear();
  }
  return indices;
}

bool UnusedSearch::reaches_nothing(const std::vector<GradHook>& hooks) {
  const RunningTask task;
  const auto reached = [&](const GradHook& hook) { return task.reaches(hook); };
  return !nests_tasks_ && std::none_of(hooks.begin(), hooks.end(), reached) &&
         !may_nest_tasks(/*same_params=*/false);
}

bool UnusedSearch::may_nest_tasks(bool same_params) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) {
    return true;
  }
  if (same_params && nodes->size() == num_nodes_) {
    return false;
  }
  num_nodes_ = nodes->size();
  return std::any_of(
      nodes->begin(), nodes->end(), [](const Node* node) { return starts_a_task(*node); });
}

}  // namespace ddpx
