// Detects when the outermost backward that reaches a reducer ends or aborts.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../errors.h"
#include "abandonment.h"
#include "backward_sync.h"

namespace ddpx {

// Observes how a tracked graph task (one run of the autograd engine) ends. Exactly one of
// on_graph_task_end() and on_graph_task_abort() is called for each tracked task, on an engine
// thread or on the thread that called backward, without the GIL. `cause`: the error of the task.
class GraphTaskObserver {
 public:
  virtual ~GraphTaskObserver() = default;
  virtual void on_graph_task_end(int task_id) = 0;
  virtual void on_graph_task_abort(int task_id, const std::string& cause) noexcept = 0;

  // A graph task has ended, and the outer task that waited for it goes on.
  virtual void on_outer_task() = 0;

  // A watched output, of a forward inside or outside no_sync(), is about to pass its gradient on: a
  // backward starts.
  virtual void on_output_grad(ForwardSync forward) = 0;
};

// The graph tasks that run now and are tracked. A reentrant checkpoint runs one task within
// another, so backward is over only when the last tracked task ends. The reducer owns the scope,
// under its mutex.
class BackwardScope {
 public:
  // Tracks the graph task that runs on this thread, unless it is tracked already: queues a callback
  // that reports its end. If the task aborts, torch destroys the callback without running it, which
  // reports the abort.
  void track(const std::weak_ptr<GraphTaskObserver>& observer);

  // The task ended or aborted.
  void leave(int task_id);

  // The observer is about to be destroyed. The tracked tasks raise the error when they end.
  void abandon(UserError error) {
    abandonment_->set(std::move(error));
  }

  bool empty() const {
    return tasks_.empty();
  }

  // Whether a node of a tracked task has raised, and the abort is not reported yet. On a device, an
  // engine thread may report the abort after the caller has caught the exception.
  bool awaits_abort() const;

  // Whether the task is tracked and still runs.
  bool contains(int task_id) const;

  // On a thread that ends a nested graph task: calls the observer's on_outer_task() as soon as the
  // outer task goes on. Returns false if nothing follows the node of the outer task, or if another
  // thread evaluates that node. The engine ends a nested task on another thread where the task
  // spans several devices, or is nested more than 60 deep.
  static bool hook_outer_task(const std::weak_ptr<GraphTaskObserver>& observer);

 private:
  struct Task {
    int id;
    const std::atomic_bool* has_raised;  // a member of the graph task; the task outlives this entry
  };

  std::vector<Task> tasks_;  // rarely more than two
  std::shared_ptr<Abandonment> abandonment_ = std::make_shared<Abandonment>();
};

}  // namespace ddpx
