// One step of gradient reduction: hooks, pack, launch, wait, write back.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arrival_order.h"
#include "arrival_tracker.h"
#include "backward_scope.h"
#include "bucket.h"
#include "bucket_plan.h"
#include "collective.h"
#include "errors.h"
#include "grad_hook.h"
#include "launch_queue.h"
#include "phase.h"
#include "used_map.h"

namespace ddpx {

struct ReducerParam {
  at::Tensor tensor;
  std::string name;
  bool expect_sparse;
};

struct ReducerOptions {
  BucketCaps caps;
  GraphMode mode;
  bool gradient_as_bucket_view;  // param.grad lies in its bucket: nothing to write back
};

// Owned by Python. Public methods may be called from any thread, without the GIL; hooks call in
// from engine threads. docs/architecture.md draws the step and its phases.
class Reducer final : public GradListener,
                      public GraphTaskObserver,
                      public std::enable_shared_from_this<Reducer> {
 public:
  // Allocates the first buckets and puts a hook on every param.
  static std::shared_ptr<Reducer> create(
      const std::vector<ReducerParam>& params,
      ReducerOptions options,
      std::shared_ptr<Collective> collective);

  // May come at any time, also within one of its own hooks.
  ~Reducer() override;

  // To be called at the start of each forward that records a graph. Rebuilds the buckets by arrival
  // order if that is due, which is a collective call; true if it did.
  bool prepare_forward();

  // Lets the reducer notice where a backward starts; to be called with the outputs of forward.
  void watch_outputs(const std::vector<at::Tensor>& outputs);

  // Whether the next backward is synchronised; read when its first gradient arrives.
  void set_sync_enabled(bool enabled) {
    sync_enabled_ = enabled;
  }
  bool sync_enabled() const {
    return sync_enabled_;
  }

  // Takes all hooks off the params; no later backward is synchronised. UserError within a backward.
  void remove_hooks();

  Phase phase() const;
  BucketPlan plan() const;

  void on_grad(std::size_t param_index) override;
  void on_output_grad() override;
  void on_graph_task_end(int task_id) override;
  void on_graph_task_abort(int task_id) noexcept override;

 private:
  Reducer(
      const std::vector<ReducerParam>& params,
      ReducerOptions options,
      std::shared_ptr<Collective> collective);

  // All of these need mutex_ held.
  void go_to(Phase phase) {
    phase_ = transition(phase_, phase);
  }
  void begin_step();
  void finish_step();
  void accept(std::size_t param_index);
  void launch_ready();
  void drain(std::size_t bucket_index);
  // Runs `call`; what a backend throws becomes a UserError that says what failed where.
  template <typename Call, typename Describe>
  auto communicate(const Call& call, const Describe& describe) const -> decltype(call());
  std::string describe_bucket(std::size_t bucket_index) const;

  void make_buckets();
  // After an abort here that peers cannot know of, since every bucket had left: does what they do
  // at the end of the step, so that the next collectives pair up.
  void match_peers() noexcept;
  void fail() noexcept;
  void recover();

  // Whether ranks tell each other at the end of this step which params they used.
  bool agrees_on_use() const {
    return options_.mode == GraphMode::kFindUnused || arrivals_.learning();
  }
  bool keeps_unused_grads() const {
    return options_.mode != GraphMode::kDefault;
  }
  void mark_used(std::size_t param_index);
  std::vector<std::string> names_of(const std::vector<std::size_t>& param_indices) const;
  errors::Where where() const {
    return {collective_->rank(), phase_};
  }

  const ReducerOptions options_;
  const std::shared_ptr<Collective> collective_;
  std::vector<at::Tensor> params_;
  std::vector<std::string> names_;
  std::vector<ParamMeta> metas_;

  mutable std::mutex mutex_;
  std::atomic<bool> sync_enabled_{true};
  Phase phase_ = Phase::kIdle;
  BucketPlan plan_;
  std::vector<Bucket> buckets_;
  LaunchQueue launches_;
  ArrivalTracker arrivals_;
  ArrivalOrder order_;
  UsedMap used_;
  BackwardScope scope_;
  std::vector<GradHook> hooks_;  // last: gone before anything that they could reach
};

}  // namespace ddpx
