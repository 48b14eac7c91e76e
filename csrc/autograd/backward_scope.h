// Tells when the outermost backward that touches a reducer ends, or dies.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

#include "backward_sync.h"

namespace ddpx {

// Told what becomes of a graph task (one run of the autograd engine) that was joined. Exactly one
// of the two comes for each, on an engine thread or on the one that called backward, without the
// GIL.
class GraphTaskObserver {
 public:
  virtual ~GraphTaskObserver() = default;
  virtual void on_graph_task_end(int task_id) = 0;
  virtual void on_graph_task_abort(int task_id) noexcept = 0;

  // The outer task of one that has ended goes on.
  virtual void on_outer_task() = 0;

  // A watched output, of a forward inside or outside no_sync(), is about to pass its gradient on: a
  // backward starts.
  virtual void on_output_grad(ForwardSync forward) = 0;
};

// The graph tasks that run now and have been joined. A reentrant checkpoint runs one task within
// another, so backward is over only when the last one leaves.
// Not thread-safe: the reducer's mutex guards it.
class BackwardScope {
 public:
  // Joins the graph task that runs on this thread, unless that has been done: queues a callback
  // that reports its end. If the task dies instead, the callback is destroyed unrun, which reports
  // the abort.
  void join(const std::weak_ptr<GraphTaskObserver>& observer);

  // The task ended or died.
  void leave(int task_id);

  bool empty() const {
    return task_ids_.empty();
  }

  // Whether the task has been joined and still runs.
  bool contains(int task_id) const;

  // On a thread that ends a graph task: whether an outer graph task waits for that task.
  static bool inside_outer_task();

  // There: sees to it that the observer hears of the outer task as soon as that goes on. False if
  // nothing follows the node of the outer task, or if another thread evaluates that node. The
  // engine ends an inner task on another thread where the inner task spans several devices, or is
  // nested more than 60 deep.
  static bool announce_outer_task(const std::weak_ptr<GraphTaskObserver>& observer);

  // The number of graph tasks that wait for the one on this thread.
  static int current_depth();

  // Whether any graph task runs on this thread.
  static bool inside_any_task();

  // Whether the graph task on this thread accumulates into every leaf, as backward() does; not so
  // for autograd.grad() and backward(inputs=...).
  static bool runs_whole_graph();

  // Whether the graph task on this thread returns the gradient that arrives at `node` to its
  // caller, as autograd.grad() does for the tensors it is asked for.
  static bool returns_grad_of(const torch::autograd::Node* node);

 private:
  std::vector<int> task_ids_;  // rarely more than two
};

}  // namespace ddpx
