#include "backward_scope.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "node_hook.h"
#include "running_task.h"

namespace ddpx {
namespace {

void queue_at_end_of_task(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

// A graph task owns this callback. The engine runs it when the task ends. If the task aborts, the
// callback is destroyed without having run.
class EndCallback {
 public:
  EndCallback(int task_id, std::shared_ptr<const Abandonment> abandonment)
      : task_id_(task_id), result_(running_task::result()), abandonment_(std::move(abandonment)) {}
  EndCallback(const EndCallback&) = delete;
  EndCallback& operator=(const EndCallback&) = delete;

  ~EndCallback() {
    if (const auto observer = observer_.lock()) {
      observer->on_graph_task_abort(task_id_, cause());
    }
  }

  // From now on, the end or the abort of the task calls `observer`.
  void arm(const std::weak_ptr<GraphTaskObserver>& observer) {
    observer_ = observer;
  }

  void run() {
    const auto observer = std::exchange(observer_, {}).lock();
    try {
      if (observer) {
        observer->on_graph_task_end(task_id_);
      } else {
        abandonment_->raise();
      }
    } catch (...) {
      // An exception here would stop the engine from running the callbacks behind this one, which
      // may belong to other reducers, whose peers wait.
      queue_at_end_of_task([error = std::current_exception()] { std::rethrow_exception(error); });
    }
  }

 private:
  std::string cause() const {
    const auto result = result_.lock();
    return result && result->hasError() ? result->tryRetrieveErrorMessage()
                                        : "the backward was aborted";
  }

  int task_id_;
  c10::weak_intrusive_ptr<c10::ivalue::Future> result_;
  std::shared_ptr<const Abandonment> abandonment_;
  std::weak_ptr<GraphTaskObserver> observer_;
};

// On a node of the outer task. Calls the observer once: a graph may have several backwards.
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

void BackwardScope::track(const std::weak_ptr<GraphTaskObserver>& observer) {
  const int task_id = running_task::id();
  if (contains(task_id)) {
    return;
  }
  // std::function must be copyable, hence the shared pointer.
  auto callback = std::make_shared<EndCallback>(task_id, abandonment_);
  queue_at_end_of_task([callback] { callback->run(); });  // throws outside a graph task
  tasks_.push_back({task_id, running_task::has_raised()});
  callback->arm(observer);  // last: an error above must not report an abort under the caller's lock
}

void BackwardScope::leave(int task_id) {
  std::erase_if(tasks_, [task_id](const Task& task) { return task.id == task_id; });
}

bool BackwardScope::contains(int task_id) const {
  return std::any_of(
      tasks_.begin(), tasks_.end(), [task_id](const Task& task) { return task.id == task_id; });
}

bool BackwardScope::awaits_abort() const {
  return std::any_of(
      tasks_.begin(), tasks_.end(), [](const Task& task) { return task.has_raised->load(); });
}

bool BackwardScope::hook_outer_task(const std::weak_ptr<GraphTaskObserver>& observer) {
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

}  // namespace ddpx
