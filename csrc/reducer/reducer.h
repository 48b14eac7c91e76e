// Averages the gradients of a module over the ranks of a process group while backward runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../autograd/backward_scope.h"
#include "../autograd/backward_sync.h"
#include "../autograd/dist_grads.h"
#include "../autograd/output_watch.h"
#include "accumulated_grads.h"
#include "context.h"
#include "join_announcement.h"
#include "reducer_state.h"
#include "revocable.h"
#include "step_runner.h"

namespace ddpx {

// The calls of the script and of autograd. The reducer decides which backwards make a step.
// StepRunner runs the steps, Step does the work of a step, and ReducerContext has the data that
// outlives steps.
//
// reducer_backward.cpp has the calls of autograd, reducer_unused.cpp the prediction of params that
// a backward does not reach, and reducer_owner.cpp several reducers of the same params. reducer.cpp
// has the other calls of the script. configure.h has settings and observers. ReducerState has what
// can be read.
//
// Python owns the reducer. Any thread may call a public method, without the GIL. Hooks call from
// engine threads. Each method takes the mutex of the context (see ExclusiveMutex), except the
// methods whose comments say otherwise. docs/architecture.md draws a step and its phases.
class Reducer final : public GradListener,
                      public GraphTaskObserver,
                      public std::enable_shared_from_this<Reducer> {
 public:
  // Allocates the first buckets and puts a hook on every param. `frozen_params` are the module's
  // other tensors, which must not require gradients. `monitor` is the failure detector of the
  // group; null if there is none.
  static std::shared_ptr<Reducer> create(
      const std::vector<ReducerParam>& params,
      ReducerOptions options,
      std::shared_ptr<Collective> collective,
      std::vector<ReducerParam> frozen_params = {},
      std::shared_ptr<health::Monitor> monitor = nullptr);

  // Allowed at any time, also within one of the reducer's own hooks. The thread that drops the last
  // reference must be able to take the GIL: members own Python objects. The watchdog, which runs
  // when the interpreter is gone, too, therefore never owns a reducer.
  ~Reducer() override;

  // ---- forward ----

  // To be called at the start of each forward that records a graph. Rebuilds the buckets by arrival
  // order if that is due, which is a collective call. Returns true if it rebuilt. UserError if a
  // param is not what was wrapped any more, if the last backward left params without gradients, or
  // if this step cannot be captured.
  // `captured`: the current stream is captured into a graph. With torch before 2.12 the reducer
  // cannot detect the capture itself.
  bool prepare_forward(bool captured = false);

  // Rebuilds the buckets if that is due, as prepare_forward() does.
  bool rebuild_buckets();

  // For recordings and peers: the module's own forward begins, after the buffers were synchronized.
  void begin_forward();

  // To be called with the outputs of forward: the reducer then sees where a backward starts.
  // `params_replaced`: other tensors were in the places of all params. A backward that brings no
  // gradient then makes no step, except in a join() context, where ranks without inputs expect one.
  void watch_outputs(const std::vector<at::Tensor>& outputs, bool params_replaced = false);

  // The weight of the next forward, for averages by weight: a number that is 0 or more, or a tensor
  // with one element.
  void set_weight(double number);
  void set_weight(const at::Tensor& tensor);

  // ---- which backward averages ----

  // Whether backwards are synchronized. A backward reads this when its first gradient arrives, and
  // a forward when its outputs are watched; see BackwardSync. Takes no lock.
  void set_sync_enabled(bool enabled) {
    sync_enabled_ = enabled;
  }
  bool sync_enabled() const {
    return sync_enabled_;
  }

  // The next backward averages, also if its forward ran while synchronization was off. UserError
  // within a backward, and in a join() context without a forward that averages.
  void prepare_for_backward();

  // The announcement of forwards in a join() context. A backward that does otherwise raises. Takes
  // no lock.
  JoinAnnouncement& join_announcement() {
    return join_announcement_;
  }

  // Makes the collective calls of a step in which this rank has no gradients and wants none, so
  // that the other ranks can make theirs.
  void shadow_step();

  // ---- manual finalization ----

  // Waits for all buckets of the step, and writes the gradients back. Raises what was wrong with
  // the step. UserError without any effect if no step can be ended now. Any thread may call this,
  // also a hook in a backward after the last bucket was launched.
  void finalize_backward();

  // ---- between steps ----

  // Whether finalize_backward() ends each step, instead of the end of backward. UserError within a
  // backward, and between a synchronized forward and the end of its step.
  void set_manual_finalization(bool required);

  // From now on the graph is the same in every step. To be called before the first backward.
  // UserError within a backward and later.
  void set_static_graph();

  // Changes to another group of ranks, with buckets as before the first step. `num_steps` replaces
  // the number of steps that ended, if given. UserError within a backward.
  void set_collective(
      std::shared_ptr<Collective> collective,
      std::optional<int64_t> num_steps = std::nullopt,
      std::shared_ptr<health::Monitor> monitor = nullptr);

  // From the next step on, buckets have these params, by index and in this order, until another
  // plan is used or the group changes. Every rank passes the same buckets at the same step.
  // UserError within a backward, but not in `after_sync`. InternalError if BucketPlan refuses the
  // plan.
  void use_buckets(std::vector<std::vector<std::size_t>> buckets);

  // Makes a reducer whose last step failed ready again. UserError within a backward.
  void reset();

  // Takes all hooks off the params: no later backward is synchronized. UserError within a backward.
  void remove_hooks();

  // ---- several reducers of the same params: one averages ----

  // From now on `owner` averages the params, until it is destroyed or take_back() is called. All
  // settings stay. UserError within a backward, and if the last backward did not end.
  void yield_to(Reducer& owner);

  // Raises the error that yield_to() would raise. The reducer does not yield.
  void check_can_yield();

  // This reducer averages its params again. The caller makes the other reducers yield.
  void take_back();

  // Whether another reducer averages the params.
  bool yielded() const {
    const auto lock = context_.mutex.lock();
    return has_yielded();
  }

  // ---- the context ----

  ReducerState state() const {
    return ReducerState(context_);
  }

  // Per param, the number of ranks that used it in the last step with an exchange, for which it
  // waits. While another thread waits for communication at the end of a step: in the last exchange
  // that was waited for.
  std::vector<int32_t> used_by_ranks();

  // Runs `change` on the context, under the mutex. For what a step reads when it begins.
  template <typename Function>
  void change(const Function& change) {
    const auto lock = context_.mutex.lock();
    change(context_);
  }

  // The same between steps. UserError within a backward, in which `call` names the caller.
  template <typename Function>
  void change_between_steps(const char* call, const Function& change) {
    const auto lock = lock_between_steps();
    check_idle(call);
    change(context_);
  }

  // As change_between_steps(), for a call that communicates: waits while another thread ends a
  // step, and has the reducer to itself. Returns what `function` returns.
  template <typename Function>
  auto run_alone(const char* call, const Function& function) {
    const auto lock = lock_after_abort();
    check_idle(call);
    const ExclusiveMutex::Occupation occupation(context_.mutex);
    return function(context_);
  }

 private:
  using Indices = std::vector<std::size_t>;
  using Lock = ExclusiveMutex::Lock;

  Reducer(Params params, ReducerOptions options, std::shared_ptr<Collective> collective);

  // Called by autograd.
  void on_grad(std::size_t param_index) override;
  void on_grad_to_come(std::size_t param_index) override;
  void on_output_grad(ForwardSync forward) override;
  void on_outer_task() override;
  void on_graph_task_end(int task_id) override;
  void on_graph_task_abort(int task_id, const std::string& cause) noexcept override;

  // The params that this backward still waits for; empty while another thread holds the mutex. Does
  // not wait. The watchdog calls it.
  std::vector<std::string> missing_params();

  // All of these need the mutex.
  bool awaits_abort() const;
  Lock lock_after_abort() const;
  Lock lock_between_steps() const;
  bool in_backward() const;
  void check_outside_backward(const char* call) const;
  void check_idle(const char* call);
  void settle(const char* call);

  void publish_to(std::shared_ptr<health::Monitor> monitor);
  void abandon_backwards() noexcept;

  // Several reducers of the same params.
  void settle_to_yield();
  bool has_yielded() const {
    return owner_ && !owner_->expired();
  }
  void reclaim();
  void check_owner() const;

  // A gradient, and the end of a backward.
  void keep_local(std::size_t param_index);
  void arrive(std::size_t param_index);
  void take_grads();
  void check_averages_cleared();
  void begin_step();
  void begin_empty_step();
  void call_after_sync(const std::function<void()>& after_sync);

  // Params that a backward does not reach.
  void predict_unused();
  void record_arrival(std::size_t param_index, bool kept_local = false);
  bool reaches_nothing() const;

  const std::shared_ptr<Revocable<Reducer>> for_watchdog_;
  ReducerContext context_;
  DistGrads dist_grads_;
  StepRunner steps_;
  AccumulatedGrads accumulated_;
  std::atomic<bool> sync_enabled_{true};
  JoinAnnouncement join_announcement_;
  BackwardScope scope_;
  BackwardSync backward_sync_;
  OutputWatch outputs_;
  std::optional<std::weak_ptr<Reducer>> owner_;  // the reducer to which this reducer has yielded
};

}  // namespace ddpx
