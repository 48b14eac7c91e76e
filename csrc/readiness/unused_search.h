// Which params a running backward does not reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../autograd/grad_hook.h"

namespace ddpx {

// The autograd engine lists the nodes of a graph task before the engine runs the first node. A
// param whose accumulator is not in the list of the outermost graph task is unreached: the param
// gets no gradient from that task, so that the param's bucket need not wait. The search costs one
// lookup per param and no walk over the graph.
//
// A node of the outermost task may start a nested task, as a reentrant checkpoint does, and the
// nested task may reach further params. The search learns these params from the arrivals of their
// gradients, on this rank and, by the used-map, on other ranks:
//
// | the arrivals of the param so far | an unreached param is |
// | --- | --- |
// | one of them in a nested task | awaited until the backward ends |
// | all of them in the outermost task, one since nested tasks are known | unused |
// | any other, and no param ever arrived in a nested task | unused |
// | any other, and another param once arrived in a nested task | awaited until the backward ends |
//
// Once two threads have run backwards of the same step at once, every param is awaited: either
// graph task reaches only a part of the params.
//
// Owned by the reducer, whose mutex guards the search. Any thread that runs a graph task may call.
class UnusedSearch {
 public:
  explicit UnusedSearch(std::size_t num_params)
      : unreached_(num_params, false), direct_in_(num_params, 0), nested_(num_params, false) {}

  // Asks the list of the graph task on this thread. `hooks` has one hook per param.
  void look(const std::vector<GradHook>& hooks);

  // The graph task of the last look().
  int task_id() const {
    return task_id_;
  }

  // A gradient of the param has arrived on this thread. Without effect before the first look().
  void note_arrival(std::size_t param_index);

  // The same in a backward that does not average, which has no look().
  void note_local_arrival(std::size_t param_index);

  // The used-map told how many ranks used each param in a step, and on how many ranks the param
  // ever arrived in a nested task.
  void note_peers(const std::vector<int32_t>& users, const std::vector<int32_t>& nesting);

  // The params that the backward of the last look() does not use, ascending.
  std::vector<std::size_t> unused() const;

  // Whether the backward of the last look() uses no param at all.
  bool reaches_nothing() const;

  // The params that arrived in a nested task, on this rank or on another one, ascending.
  std::vector<std::size_t> nested() const;

 private:
  void learn_nested(std::size_t param_index);

  static constexpr int kNoTask = -1;

  int task_id_ = kNoTask;
  bool task_is_outermost_ = false;
  bool several_threads_ = false;
  std::vector<bool> unreached_;           // per param, by the last look()
  std::vector<uint64_t> direct_in_;       // per param: the last look() whose task brought it
  std::vector<bool> nested_;              // per param: arrived in a nested task
  uint64_t num_looks_ = 1;                // 0 in direct_in_: no look() brought the param
  std::optional<uint64_t> nested_since_;  // the look() before the first nested arrival
};

}  // namespace ddpx
