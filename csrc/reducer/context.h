// The parts of a reducer that outlive its steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../buckets/bucket_set.h"
#include "../buckets/low_precision.h"
#include "../comm/collective.h"
#include "../health/calls/step_guard.h"
#include "../observe/step_observer.h"
#include "../readiness/awaited_steps.h"
#include "../readiness/script_grads.h"
#include "../readiness/step_history.h"
#include "exclusive_mutex.h"
#include "params.h"
#include "phase.h"
#include "settings.h"
#include "step_errors.h"
#include "weights.h"

namespace ddpx {

// Set when the module is wrapped. Later calls may change `mode` and `precision`, between steps.
struct ReducerOptions {
  BucketCaps caps;
  GraphMode mode;
  bool gradient_as_bucket_view;      // `param.grad` lies in its bucket after a step
  bool batched_copy = false;         // the gradients of a bucket are packed together, then divided
  bool skip_unused_buckets = false;  // see ParamUse::predicts_unused()
  std::optional<std::size_t> delay_trigger = std::nullopt;  // index of a param; see ReducerParam
  Precision precision = {};
  bool lazy_buckets = false;  // dense buckets have memory only within steps
  // The param indices of each bucket, from the first step on. Empty: by `caps`, and by the order in
  // which gradients arrive.
  std::vector<std::vector<std::size_t>> listed_buckets = {};
  Average average = Average::kMean;
  std::string module_name = "a module";  // in error texts
  int64_t small_grad_bytes = 0;  // on a device, smaller gradients of a bucket are packed together

  // Whether buckets are rebuilt once the order of arrival is known.
  bool rebuilds_buckets(GraphMode of_mode) const {
    return of_mode != GraphMode::kFindUnused && listed_buckets.empty();
  }
};

// The progress of the reducer in its steps. ReducerContext::go_to() changes the phase.
struct Progress {
  Phase phase = Phase::kIdle;
  bool captured = false;  // the last forward, or the running step, is captured into a graph
  int64_t num_steps = 0;  // synchronized steps that ended, on this rank or for its peers
  AwaitedSteps awaited;
  std::string last_error;  // empty if no step and no setting has failed
};

// The data of all steps. The reducer owns the context; its mutex guards all other members.
struct ReducerContext {
  ReducerContext(
      Params wrapped_params, ReducerOptions wrapped_options, std::shared_ptr<Collective> group);

  // False where no other rank exists, no hook stands in for the all-reduce, and no weight divides:
  // there are no buckets then, and nothing is copied.
  bool communicates() const {
    return communicates_over(*collective);
  }
  // Whether the last forward, the running step, or the current stream is captured into a graph.
  bool is_captured() const;
  bool use_varies() const {
    return history.use_varies(options.mode);
  }
  bool use_is_exchanged() const {
    return history.use_is_exchanged(options.mode);
  }

  // Marks the param as used by this rank, if ranks exchange that, and if the param has a gradient.
  void mark_used(std::size_t param_index);
  // The same for a backward without average. The default mode marks, too: set_static_graph() may
  // come before the first average.
  void mark_used_locally(std::size_t param_index);

  // Casts `param.grad` while further parts may arrive, or to the dtype after the step.
  void cast_grad_to_local(std::size_t param_index) const;
  void cast_grad_to_averaged(std::size_t param_index) const;

  // The bucket of the param must wait for the current stream.
  void add_stream_of(std::size_t param_index);

  uint32_t step_number() const {
    return static_cast<uint32_t>(progress.num_steps);
  }
  void emit(StepEvent event, std::size_t index = 0) {
    observer.emit(event, step_number(), index);
  }

  errors::Where where() const;
  UserError error(const std::string& text) const {
    return errors::at(where(), text);
  }
  // Remembers the error for logging data, and throws it.
  [[noreturn]] void raise(const UserError& raised);
  [[noreturn]] void raise(const std::string& text) {
    raise(error(text));
  }
  std::string describe_bucket(std::size_t bucket_index) const;

  // Runs `call` without the mutex. Turns an error of a backend into an error with rank, step, phase
  // and the text of describe(), which names the collective call.
  template <typename Call, typename Describe>
  auto communicate(const Call& call, const Describe& describe) const -> decltype(call()) {
    const auto where = this->where();
    const ExclusiveMutex::Unlocked unlocked(mutex);
    try {
      return call();
    } catch (...) {
      explain(where, describe());
    }
  }

  void go_to(Phase next);

  // The step has ended on this rank.
  void count_step();

  // The step has ended on peers: it broke off on this rank, or this rank had no gradients. The
  // clock gives no report of the step. After an abort a static graph goes on learning, because
  // gradients may lack parts.
  void skip_step();

  // Bucket plans for these options.
  BucketPlan initial_plan(GraphMode mode) const;
  BucketPlan plan_by_arrival(const std::vector<std::size_t>& order) const;

  // Allocates the buckets of `plan`, then replaces the present buckets. A failed allocation changes
  // nothing.
  void replace_buckets(BucketPlan plan);

  // Resets the context to its state before the first step, with this mode, this group and this
  // number of steps that ended. A failed allocation changes nothing.
  void start_over(GraphMode mode, std::shared_ptr<Collective> group, int64_t steps_ended);

  // Publishes the param names of each bucket, for the error texts of peers.
  void publish_bucket_names();

  ExclusiveMutex mutex;
  Progress progress;
  ReducerOptions options;
  ReducerSettings settings;
  std::shared_ptr<Collective> collective;
  Params params;
  BucketSet buckets;
  StepHistory history;
  ScriptGrads script_grads;
  Weights weights;
  StepObserver observer;
  health::StepGuard guard;

 private:
  bool communicates_over(const Collective& group) const {
    return settings.comm_hook || !group.alone() || options.average == Average::kWeights;
  }
  std::vector<Bucket> allocate(const BucketPlan& plan, Collective& group) const;
  void install(BucketPlan plan, std::vector<Bucket> allocated);
  void mark_if_grad(std::size_t param_index);
  [[noreturn]] void explain(const errors::Where& where, const std::string& what) const;
};

}  // namespace ddpx
