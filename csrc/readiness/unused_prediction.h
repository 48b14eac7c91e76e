// Predicts, when a backward begins, which params the backward does not use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace ddpx {

// A graph task of the autograd engine: its id, and the number of graph tasks that wait for it.
struct GraphTaskId {
  int id;
  int depth;
};

// The autograd engine lists the nodes of a graph task before it runs the first node. A param whose
// accumulator is not in the list of the outermost graph task is unreached: the param gets no
// gradient from that task, so the bucket of the param need not wait.
//
// A node of the outermost task may start a nested task, as a reentrant checkpoint does, and the
// nested task may reach further params. The prediction learns these params from the arrivals of
// their gradients, on this rank and, by the used-map, on other ranks:
//
// | the arrivals of the param so far | an unreached param is |
// | --- | --- |
// | one of them in a nested task | awaited until the backward ends |
// | all of them in the outermost task, one since nested tasks are known | unused |
// | any other, and no param ever arrived in a nested task | unused |
// | any other, and another param once arrived in a nested task | awaited until the backward ends |
//
// A step may begin in a nested task, if outputs are hidden or the wrapper's forward was bypassed.
// The list of that task lacks what the outermost task reaches, so every param is awaited.
//
// Once two threads have run backwards of the same step at once, every param is awaited: either
// graph task reaches only a part of the params.
//
// The reducer owns the prediction, under its mutex.
class UnusedPrediction {
 public:
  explicit UnusedPrediction(std::size_t num_params)
      : unreached_(num_params, false), direct_in_(num_params, 0), nested_(num_params, false) {}

  std::size_t num_params() const {
    return nested_.size();
  }

  // A backward begins in `task`, which does not reach these params (one flag per param).
  void begin(GraphTaskId task, std::vector<bool> unreached);

  // The task of the last begin(); -1 before the first one.
  int task_id() const {
    return task_id_;
  }

  // A gradient of the param has arrived in `task`. Without effect before the first begin().
  void record_arrival(std::size_t param_index, GraphTaskId task);

  // The same in a backward that does not average, for which begin() is not called.
  void record_local_arrival(std::size_t param_index, GraphTaskId task);

  // Per param, on how many ranks a step used the param, and on how many ranks the param ever
  // arrived in a nested task: the sums of the used-map.
  void learn_from_ranks(const std::vector<int32_t>& users, const std::vector<int32_t>& nesting);

  // The params that the backward of the last begin() does not use, ascending.
  std::vector<std::size_t> unused() const;

  // Whether the backward of the last begin() uses no param at all.
  bool reaches_nothing() const;

  // The params that arrived in a nested task, on this rank or on another one, ascending.
  std::vector<std::size_t> nested() const;

 private:
  void learn_nested(std::size_t param_index);

  static constexpr int kNoTask = -1;

  int task_id_ = kNoTask;
  bool task_is_outermost_ = false;
  bool several_threads_ = false;
  std::vector<bool> unreached_;  // per param, by the last begin()
  std::vector<uint64_t>
      direct_in_;             // per param: the last begin() in whose task the gradient arrived
  std::vector<bool> nested_;  // per param: arrived in a nested task
  uint64_t num_begins_ = 1;   // 0 in direct_in_: the gradient arrived in no such task
  std::optional<uint64_t> nested_since_;  // the begin() before the first nested arrival
};

}  // namespace ddpx
