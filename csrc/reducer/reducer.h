// One step of gradient reduction: hooks, pack, launch, wait, write back.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../autograd/backward_scope.h"
#include "../autograd/backward_sync.h"
#include "../autograd/grad_hook.h"
#include "../autograd/grad_link.h"
#include "../autograd/output_watch.h"
#include "../buckets/bucket.h"
#include "../buckets/bucket_plan.h"
#include "../buckets/device_stream.h"
#include "../buckets/low_precision.h"
#include "../comm/collective.h"
#include "../comm/comm_hook.h"
#include "../comm/launch_queue.h"
#include "../errors.h"
#include "../health/step_notes.h"
#include "../observe/finite_check.h"
#include "../observe/recording.h"
#include "../observe/step_clock.h"
#include "../readiness/arrival_order.h"
#include "../readiness/arrival_tracker.h"
#include "../readiness/unused_search.h"
#include "../readiness/used_map.h"
#include "phase.h"

namespace ddpx {

struct ReducerParam {
  at::Tensor tensor;
  std::string name;
  bool expect_sparse;
  bool delayed = false;  // its bucket leaves when the gate's gradient is there, too

  // If `tensor` is the local shard of a DTensor: that one, and the link between their gradients.
  at::Tensor leaf = {};
  std::shared_ptr<GradLink> link = nullptr;
};

struct ReducerOptions {
  BucketCaps caps;
  GraphMode mode;
  bool gradient_as_bucket_view;      // param.grad lies in its bucket: nothing to write back
  bool batched_copy = false;         // a bucket's gradients are packed together, then divided
  bool skip_unused_buckets = false;  // no all-reduce of a bucket that no rank used a step before
  std::optional<std::size_t> gate = std::nullopt;  // buckets of delayed params wait for this param
  Precision precision = {};
};

// Owned by Python. Public methods may be called from any thread, without the GIL; hooks call in
// from engine threads. No thread waits for communication, or runs a communication hook, while it
// holds the mutex. docs/architecture.md draws the step and its phases.
// reducer.cpp has the step, reducer_use.cpp what ranks agree on about the use of params,
// reducer_reports.cpp what it reports at its end, reducer_failure.cpp what becomes of one that
// broke off; reducer_control.cpp what is between steps, reducer_settings.cpp what others set or
// see.
class Reducer final : public GradListener,
                      public GraphTaskObserver,
                      public health::Subject,
                      public std::enable_shared_from_this<Reducer> {
 public:
  // Allocates the first buckets and puts a hook on every param. `bystanders` are the module's other
  // tensors that must not require gradients.
  static std::shared_ptr<Reducer> create(
      const std::vector<ReducerParam>& params,
      ReducerOptions options,
      std::shared_ptr<Collective> collective,
      std::vector<ReducerParam> bystanders = {});

  // May come at any time, also within one of its own hooks.
  ~Reducer() override;

  // To be called at the start of each forward that records a graph. Rebuilds the buckets by arrival
  // order if that is due, which is a collective call; true if it did. UserError if a param is not
  // what was wrapped any more.
  bool prepare_forward();

  // The rebuild alone, if it is due; true if it was.
  bool rebuild_buckets();

  // For who looks: the module's forward begins only now, after buffers were waited for.
  void begin_forward();

  // Lets the reducer notice where a backward starts; to be called with the outputs of forward.
  void watch_outputs(const std::vector<at::Tensor>& outputs);

  // Makes the collective calls of a step in which this rank has no gradients and wants none, so
  // that the other ranks can make theirs.
  void shadow_step();

  // Whether backwards are synchronised; a backward reads it when its first gradient arrives, and a
  // forward when its outputs are watched. See BackwardSync.
  void set_sync_enabled(bool enabled) {
    sync_enabled_ = enabled;
  }
  bool sync_enabled() const {
    return sync_enabled_;
  }

  // The next backward averages, also if its forward ran while synchronisation was off.
  void prepare_for_backward();

  // Hands every bucket to `hook` instead of the all-reduce; once. UserError if there is one.
  void set_comm_hook(std::shared_ptr<CommHook> hook);

  // Gradients arrive in one dtype and are summed in another by `hook`, which takes the place of a
  // communication hook; param.grad is in the param's own between backwards.
  void set_mixed_precision(Precision precision, std::shared_ptr<CommHook> hook);

  // From the next step on, what gradients are divided by; the world size if nothing. May come at
  // any time.
  void set_divisor(std::optional<int> divisor);

  // A forward of a join() context has announced to ranks without inputs whether its backward
  // averages. A backward that does otherwise raises.
  void announce_joined_step(bool averages);
  // The join() context has ended. Takes no lock.
  void leave_join() {
    joined_step_ = JoinedStep::kOutsideJoin;
  }

  // From the next step on the sparse gradient of a param has entries in these rows only, on every
  // rank; see Bucket::set_rows. UserError if the param's gradient is not expected to be sparse. May
  // come at any time.
  void set_sparse_rows(std::size_t param_index, const at::Tensor& rows);

  // Whether backward raises, on every rank, if a gradient of any rank is not finite; costs an
  // all-reduce of a few bytes a step, and the same must be set on all ranks. UserError within a
  // backward.
  void set_check_finite(bool enabled);

  // While the current stream of the params' device is captured into a graph: UserError if a step
  // reads on the host. For torch before 2.12, which does not tell the reducer of a capture.
  void refuse_capture() const;

  // From here on what happens is noted in `recording`, too. UserError within a backward.
  void add_recording(std::shared_ptr<Recording> recording);

  // Not any more; may come at any time.
  void remove_recording(const std::shared_ptr<Recording>& recording);

  // All ranks have just constructed the wrapper together, which gives it its number in the group.
  void number_as_constructed();

  // The recordings of `older`, of the same params, go on here, and so do its count of steps
  // and its number. To be called before the first step.
  void continue_from(Reducer& older);

  // Called after each synchronised backward, on the thread that ends it. May come at any time.
  void set_after_sync(std::function<void()> after_sync);

  // From here on the graph is the same in every step; before the first backward only.
  void set_static_graph();

  // Goes over to other ranks, with buckets as before the first step, as if this one had made
  // `num_steps` steps; those that it has made, if nothing is said.
  void set_collective(
      std::shared_ptr<Collective> collective, std::optional<int64_t> num_steps = std::nullopt);

  // Makes a reducer whose last step went wrong ready again. UserError within a backward.
  void reset();

  // Takes all hooks off the params; no later backward is synchronised. UserError within a backward.
  void remove_hooks();

  // Whether every step so far used the same params equally often.
  bool graph_was_static() const;

  Phase phase() const;
  BucketPlan plan() const;
  std::vector<std::size_t> arrival_order() const;  // of the step by which buckets were rebuilt

  // Per param, in the last step that ranks agreed about. While another thread waits for
  // communication at the end of a step: in the last one whose agreement was waited for.
  std::vector<int32_t> used_by_ranks();
  StepReport report() const;
  int64_t num_steps() const;       // synchronised ones that ended, here or for peers
  bool recorded() const;           // by any recording
  std::string last_error() const;  // empty if no step or setting was at fault so far
  void set_sample_rate(int64_t sample_rate);

  // For peers that wait; nothing while the reducer is at work.
  std::vector<std::string> missing_params() override;

  void on_grad(std::size_t param_index) override;
  void on_grad_to_come(std::size_t param_index) override;
  void on_output_grad(ForwardSync forward) override;
  void on_outer_task() override;
  void on_graph_task_end(int task_id) override;
  void on_graph_task_abort(int task_id) noexcept override;

 private:
  using Doing = health::Doing;
  using Indices = std::vector<std::size_t>;
  using Lock = std::unique_lock<std::recursive_mutex>;

  Reducer(
      const std::vector<ReducerParam>& params,
      ReducerOptions options,
      std::shared_ptr<Collective> collective,
      std::vector<ReducerParam> bystanders);

  // Locks the reducer for a call that may change it: waits while another thread has it to itself.
  Lock enter() const;

  // As enter(), for a call that is refused within a backward: does not wait for the end of one, as
  // that may wait for this thread.
  Lock enter_between_steps() const;

  // While it lives, its thread has the reducer to itself, also where it lets go of the mutex to
  // wait. Others may look meanwhile. To be made and destroyed with the mutex held.
  class Occupation {
   public:
    explicit Occupation(const Reducer& reducer);
    ~Occupation();
    Occupation(const Occupation&) = delete;
    Occupation& operator=(const Occupation&) = delete;

   private:
    const Reducer& reducer_;
    bool outermost_;
  };

  // While it lives, its thread does without the mutex that it holds.
  class Unlocked {
   public:
    explicit Unlocked(std::recursive_mutex& mutex) : mutex_(mutex) {
      mutex_.unlock();
    }
    ~Unlocked() {
      mutex_.lock();
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

   private:
    std::recursive_mutex& mutex_;
  };

  // All of these need mutex_ held.
  void go_to(Phase phase) {
    phase_ = transition(phase_, phase);
    for (const auto& recording : recordings_) {
      recording->note_on_host(EventKind::kPhase, step_number(), static_cast<std::size_t>(phase));
    }
  }
  void note(EventKind kind, std::size_t index = 0) {
    for (const auto& recording : recordings_) {
      recording->note(kind, step_number(), index);
    }
  }
  void note_outside() {
    notes_.begin_step(step_number());
    notes_.note(Doing::kOutside);
  }
  void collect_recordings() {
    for (const auto& recording : recordings_) {
      recording->collect();
    }
  }
  uint32_t step_number() const {
    return static_cast<uint32_t>(clock_.num_steps());
  }

  // A step.
  void begin_step();
  void begin_empty_step();
  void begin_joined_step();
  void search_unused();
  bool reaches_nothing() const;
  void arrive(std::size_t param_index);
  void accept(std::size_t param_index);
  void cast_to_local_dtype(std::size_t param_index);
  void cast_to_averaged_dtype(std::size_t param_index);
  void note_stream_of(std::size_t param_index);
  void keep_arrived(std::size_t param_index);
  std::optional<at::Tensor> take_arrived(std::size_t param_index);
  void pack_into_slot(std::size_t param_index);
  void fill(std::size_t bucket_index);
  void pack_held(Bucket& bucket);
  void look_at(Bucket& bucket);
  void open_gate();
  void launch_ready();
  void launch(Bucket& bucket, std::size_t bucket_index);
  void finish_step(bool output_reached);
  void drain_all();
  void drain(std::size_t bucket_index);
  void report_end(const errors::Where& where, const Indices& missing, bool output_reached);
  void report_not_finite();
  void report_later(UserError error);
  [[noreturn]] void raise(const UserError& error);
  int divisor() const;
  void mark_used(std::size_t param_index);

  // Otherwise gradients are final as they arrive: there are no buckets, and nothing is copied.
  bool communicates() const {
    return comm_hook_ || !collective_->alone();
  }

  // Whether ranks tell each other at the end of this step which params they used.
  bool agrees_on_use() const {
    return options_.mode == GraphMode::kFindUnused ||
           (options_.mode == GraphMode::kStatic && !static_use_agreed_);
  }
  bool keeps_unused_grads() const {
    return options_.mode != GraphMode::kDefault;
  }
  bool as_views(const Bucket& bucket) const {
    return options_.gradient_as_bucket_view && bucket.can_lend();
  }
  bool gated(std::size_t bucket_index) const;
  bool packs_when_full(const Bucket& bucket) const {
    return options_.batched_copy && !bucket.sparse();
  }

  // The use of params.
  void agree_on_use();
  const std::vector<int32_t>& num_ranks_using();
  bool skipped(std::size_t bucket_index) const;
  Indices skipped_by_mistake();
  void reduce_skipped_by_mistake();
  void learn_use();
  void forget_use();

  // Buckets of zeros, of a rank that has no gradients.
  using Shadows = std::map<std::size_t, Bucket>;  // by bucket index
  Shadows launch_zeros(const Indices& bucket_indices);
  void wait_for(Shadows& shadows);

  // Between steps.
  void join_group();
  BucketPlan initial_plan(GraphMode mode) const;
  std::vector<Bucket> build_buckets(const BucketPlan& plan) const;  // none if nobody is there
  std::vector<Bucket> build_buckets(const BucketPlan& plan, Collective& collective) const;
  void install(BucketPlan plan, std::vector<Bucket> buckets);
  void apply_settings();
  void name_buckets();
  bool rebuild_if_due();
  void check_params();
  bool reads_on_host() const {
    return options_.mode == GraphMode::kFindUnused || finite_check_;
  }
  void check_capture() const;
  bool all_frozen() const;
  bool match_peers() noexcept;
  void join_arrivals();
  void count_broken_step();
  void fail() noexcept;
  void recover();

  // Runs `call` without the mutex; what a backend throws becomes an error that says what failed
  // where.
  template <typename Call, typename Describe>
  auto communicate(const Call& call, const Describe& describe) const -> decltype(call());
  [[noreturn]] void explain(const errors::Where& where, const std::string& what) const;
  std::string describe_bucket(std::size_t bucket_index) const;
  std::vector<std::string> names_of(const Indices& param_indices) const;
  errors::Where where() const {
    return {collective_->rank(), clock_.num_steps(), phase_};
  }

  ReducerOptions options_;
  std::shared_ptr<Collective> collective_;
  std::vector<at::Tensor> params_;
  std::vector<at::Tensor> leaves_;  // as autograd knows the params
  GradLinks links_;
  std::vector<std::string> names_;
  std::vector<ParamMeta> metas_;
  std::vector<ReducerParam> bystanders_;

  // Recursive: a warning, or a tensor that is dropped, may run Python code that looks at the
  // reducer.
  mutable std::recursive_mutex mutex_;
  mutable std::condition_variable_any changed_;  // of the two that follow
  mutable std::optional<std::thread::id> occupant_;
  bool launching_ = false;  // a thread launches buckets, perhaps without the mutex
  std::atomic<bool> sync_enabled_{true};
  std::atomic<JoinedStep> joined_step_{JoinedStep::kOutsideJoin};
  Phase phase_ = Phase::kIdle;
  BucketPlan plan_;
  std::vector<Bucket> buckets_;
  LaunchQueue launches_;
  ArrivalTracker arrivals_;
  std::map<std::size_t, at::Tensor> arrived_grads_;  // by param index: those to be packed later
  ArrivalOrder order_;
  Indices agreed_order_;
  UsedMap used_;
  UsedMap::Sums last_use_;  // a copy, since used_ changes without the mutex while ranks agree
  bool static_use_agreed_ = false;
  UnusedSearch unused_search_;
  Indices unused_by_all_;               // in the last step; only if buckets may be skipped
  std::vector<bool> left_alone_;        // per param: neither packed nor written back in this step
  std::optional<UserError> to_report_;  // found in this step, thrown at its end
  std::string last_error_;
  std::vector<bool> seen_;  // per param: a gradient came since the last forward
  Indices owed_;            // missing, but an output of the last forward may bring them
  std::map<std::size_t, at::Tensor> sparse_rows_;  // by param index
  std::shared_ptr<CommHook> comm_hook_;
  std::optional<int> divisor_;
  std::optional<int> step_divisor_;          // of the step that runs
  std::optional<FiniteCheck> finite_check_;  // if gradients are to be checked
  std::function<void()> after_sync_;
  StepClock clock_;
  health::StepNotes notes_;                             // for peers
  std::vector<std::shared_ptr<Recording>> recordings_;  // none unless someone looks
  OutputWatch outputs_;
  BackwardScope scope_;
  BackwardSync backward_sync_;
  std::vector<GradHook> hooks_;  // last: gone before anything that they could reach
};

template <typename Call, typename Describe>
auto Reducer::communicate(const Call& call, const Describe& describe) const -> decltype(call()) {
  const auto where = this->where();
  const Unlocked unlocked(mutex_);
  try {
    return call();
  } catch (...) {
    explain(where, describe());
  }
}

}  // namespace ddpx
