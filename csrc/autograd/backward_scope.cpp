#include "backward_scope.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "node_hook.h"

namespace ddpx {
namespace {

constexpr int kNoTask = -1;

void queue_at_end_of_task(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

// Lives in the callback that a graph task owns, and dies with it.
class Ticket {
 public:
  explicit Ticket(int task_id) : task_id_(task_id) {}
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  ~Ticket() {
    if (const auto observer = observer_.lock()) {
      observer->on_graph_task_abort(task_id_);
    }
  }

  // From here on somebody is told what becomes of the task.
  void arm(const std::weak_ptr<GraphTaskObserver>& observer) {
    observer_ = observer;
  }

  void redeem() {
    const auto observer = std::exchange(observer_, {}).lock();
    if (!observer) {
      return;
    }
    try {
      observer->on_graph_task_end(task_id_);
    } catch (...) {
      // Thrown here it would keep the engine from running the callbacks behind this one, which may
      // be those of other reducers, with peers that wait for them.
      queue_at_end_of_task([error = std::current_exception()] { std::rethrow_exception(error); });
    }
  }

 private:
  int task_id_;
  std::weak_ptr<GraphTaskObserver> observer_;
};

// On a node of the outer task; once, since the graph may be gone through again.
class OuterTaskHook final : public NodeHook<torch::autograd::FunctionPreHook> {
 public:
  explicit OuterTaskHook(std::weak_ptr<GraphTaskObserver> observer)
      : observer_(std::move(observer)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (const auto observer = std::exchange(observer_, {}).lock()) {
      observer->on_outer_task();
    }
    return grads;
  }

 private:
  std::weak_ptr<GraphTaskObserver> observer_;
};

}  // namespace

void BackwardScope::join(const std::weak_ptr<GraphTaskObserver>& observer) {
  const int task_id = torch::autograd::get_current_graph_task_id();
  if (contains(task_id)) {
    return;
  }
  // std::function must be copyable, hence the shared pointer.
  auto ticket = std::make_shared<Ticket>(task_id);
  queue_at_end_of_task([ticket] { ticket->redeem(); });  // throws outside a graph task
  task_ids_.push_back(task_id);
  ticket->arm(observer);  // last: an error above must not report an abort under the caller's lock
}

void BackwardScope::leave(int task_id) {
  task_ids_.erase(std::remove(task_ids_.begin(), task_ids_.end(), task_id), task_ids_.end());
}

bool BackwardScope::contains(int task_id) const {
  return std::find(task_ids_.begin(), task_ids_.end(), task_id) != task_ids_.end();
}

// Torch exports the address of a member of the task, but neither the task nor its depth.
int BackwardScope::current_depth() {
  using torch::autograd::GraphTask;
  const auto* member = torch::autograd::get_current_graph_task_exec_info();
  if (member == nullptr) {
    return 0;
  }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr auto offset = offsetof(GraphTask, exec_info_);
#pragma GCC diagnostic pop
  const auto* address = reinterpret_cast<const char*>(member) - offset;
  return reinterpret_cast<const GraphTask*>(address)->reentrant_depth_;
}

bool BackwardScope::inside_outer_task() {
  return torch::autograd::get_current_node() || current_depth() > 0;
}

bool BackwardScope::announce_outer_task(const std::weak_ptr<GraphTaskObserver>& observer) {
  // A hook on an accumulator would stay with its leaf, so another node is better.
  const auto node = torch::autograd::get_current_node();
  if (!node) {
    return false;
  }
  torch::autograd::Node* next = nullptr;
  for (const auto& edge : node->next_edges()) {
    if (edge.is_valid() && (next == nullptr || next->num_outputs() == 0)) {
      next = edge.function.get();
    }
  }
  if (next != nullptr) {
    next->add_pre_hook(std::make_unique<OuterTaskHook>(observer));
  }
  return next != nullptr;
}

bool BackwardScope::inside_any_task() {
  return torch::autograd::get_current_graph_task_id() != kNoTask;
}

bool BackwardScope::runs_whole_graph() {
  const auto* asked_for = torch::autograd::get_current_graph_task_exec_info();
  return asked_for == nullptr || asked_for->empty();
}

bool BackwardScope::returns_grad_of(const torch::autograd::Node* node) {
  const auto* asked_for = torch::autograd::get_current_graph_task_exec_info();
  if (asked_for == nullptr) {
    return false;
  }
  const auto entry = asked_for->find(const_cast<torch::autograd::Node*>(node));
  return entry != asked_for->end() && entry->second.captures_ != nullptr;
}

}  // namespace ddpx
