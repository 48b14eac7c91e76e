#include "unused_prediction.h"

#include <algorithm>
#include <utility>

namespace ddpx {

void UnusedPrediction::begin(GraphTaskId task, std::vector<bool> unreached) {
  unreached_ = std::move(unreached);
  ++num_begins_;
  task_id_ = task.id;
  task_is_outermost_ = task.depth == 0;
}

void UnusedPrediction::record_arrival(std::size_t param_index, GraphTaskId task) {
  if (task_id_ == kNoTask) {
    return;
  }
  const bool in_that_task = task.id == task_id_;
  if (!in_that_task && task_is_outermost_ && task.depth == 0) {
    several_threads_ = true;
  } else if (unreached_[param_index] || !in_that_task || !task_is_outermost_) {
    learn_nested(param_index);
  } else {
    direct_in_[param_index] = num_begins_;
  }
}

void UnusedPrediction::record_local_arrival(std::size_t param_index, GraphTaskId task) {
  if (task.depth > 0) {
    learn_nested(param_index);
  }
}

void UnusedPrediction::learn_from_ranks(
    const std::vector<int32_t>& users, const std::vector<int32_t>& nesting) {
  for (std::size_t i = 0; i < users.size(); ++i) {
    if (nesting[i] != 0) {
      learn_nested(i);
    } else if (users[i] != 0) {
      direct_in_[i] = num_begins_;
    }
  }
}

std::vector<std::size_t> UnusedPrediction::unused() const {
  std::vector<std::size_t> indices;
  if (several_threads_ || !task_is_outermost_) {
    return indices;
  }
  for (std::size_t i = 0; i < unreached_.size(); ++i) {
    const bool may_nest = nested_[i] || (nested_since_ && direct_in_[i] < *nested_since_);
    if (unreached_[i] && !may_nest) {
      indices.push_back(i);
    }
  }
  return indices;
}

bool UnusedPrediction::reaches_nothing() const {
  return task_is_outermost_ && !nested_since_ && !several_threads_ &&
         std::find(unreached_.begin(), unreached_.end(), false) == unreached_.end();
}

std::vector<std::size_t> UnusedPrediction::nested() const {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; nested_since_ && i < nested_.size(); ++i) {
    if (nested_[i]) {
      indices.push_back(i);
    }
  }
  return indices;
}

void UnusedPrediction::learn_nested(std::size_t param_index) {
  nested_[param_index] = true;
  if (!nested_since_) {
    nested_since_ = num_begins_;
  }
}

}  // namespace ddpx
