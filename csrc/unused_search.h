// Which params a running backward does not reach.
#pragma once

#include <cstddef>
#include <vector>

#include "grad_hook.h"

namespace ddpx {

// The autograd engine lists the nodes of a graph task before it runs the first of them. A param
// whose accumulator is not in that list gets no gradient from this task, so that its bucket need
// not wait for it. The list costs no walk over the graph: the engine has made it.
//
// The list is no proof if a node of the task starts another task, as a reentrant checkpoint does:
// that one may reach further params. Such models are recognised by their nodes, or by a gradient
// that comes although its param was not in the list; from then on nothing is called unused.
//
// Owned by the reducer, guarded by its mutex. To be called on a thread that runs the graph task.
class UnusedSearch {
 public:
  explicit UnusedSearch(std::size_t num_params) : unreached_(num_params, false) {}

  // Starts a step. Returns the params that this graph task does not reach, ascending; none if
  // another task may reach them. `hooks` has one hook a param.
  std::vector<std::size_t> begin_step(const std::vector<GradHook>& hooks);

  // A gradient of the param has arrived.
  void note_arrival(std::size_t param_index) {
    if (unreached_[param_index]) {
      nests_tasks_ = true;
    }
  }

  // Whether this graph task reaches none of the params, and no other task can.
  bool reaches_nothing(const std::vector<GradHook>& hooks);

 private:
  // Whether a node of the running task starts another task. Looks at each node, unless the task has
  // as many nodes, and reaches the same params, as the one of the step before.
  bool may_nest_tasks(bool same_params);

  bool nests_tasks_ = false;
  std::vector<bool> unreached_;  // per param, by the task that began this step
  std::size_t num_nodes_ = 0;    // of the task that was looked at last
};

}  // namespace ddpx
