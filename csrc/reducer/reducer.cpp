#include "reducer.h"

#include <algorithm>
#include <utility>

#include "../autograd/running_task.h"

namespace ddpx {

// ---- construction and destruction ---------------------------------------------------------------

std::shared_ptr<Reducer> Reducer::create(
    const std::vector<ReducerParam>& params,
    ReducerOptions options,
    std::shared_ptr<Collective> collective,
    std::vector<ReducerParam> frozen_params) {
  Params checked(params, std::move(frozen_params));
  if (options.delay_trigger && *options.delay_trigger >= params.size()) {
    throw errors::no_such_param(*options.delay_trigger, params.size());
  }
  std::shared_ptr<Reducer> reducer(
      new Reducer(std::move(checked), std::move(options), std::move(collective)));
  reducer->context_.params.attach_hooks(reducer);
  reducer->register_with_group();
  return reducer;
}

Reducer::Reducer(Params params, ReducerOptions options, std::shared_ptr<Collective> collective)
    : context_(std::move(params), std::move(options), std::move(collective)),
      seen_(context_.params.size(), false) {
  context_.replace_buckets(context_.buckets.plan());
}

Reducer::~Reducer() {
  if (context_.phase != Phase::kIdle || running_task::in_backward()) {
    context_.params.abandon_hooks();
  }
}

// Peers learn of this wrapper.
void Reducer::register_with_group() {
  context_.observer.peers() = health::StepTracker(
      context_.collective->monitor(),
      [weak = weak_from_this()] {
        const auto self = weak.lock();
        return self ? self->missing_params() : std::vector<std::string>();
      },
      context_.params.names());
  context_.publish_bucket_names();
  emit(StepEvent::kIdle);
}

void Reducer::check_idle(const char* call) const {
  if (context_.phase != Phase::kIdle) {
    throw errors::inside_backward(context_.where(), call);
  }
}

// Whether an engine thread is about to report the abort of a backward. False inside a backward,
// which could wait for itself.
bool Reducer::awaits_abort() const {
  return !running_task::in_backward() && scope_.awaits_abort();
}

// For calls of the user. The calls of autograd take the mutex without this wait, because the abort
// may wait for them.
Reducer::Lock Reducer::lock_after_abort() const {
  return context_.mutex.lock_when(
      [this] { return !awaits_abort() && !context_.mutex.occupied_by_other(); });
}

// For calls that raise within a backward, also on a thread for which this backward waits.
Reducer::Lock Reducer::lock_between_steps() const {
  return context_.mutex.lock_when([this] {
    const bool in_step =
        context_.phase == Phase::kCollecting || context_.phase == Phase::kFinalizing;
    return !awaits_abort() && (in_step || !context_.mutex.occupied_by_other());
  });
}

// ---- forward ------------------------------------------------------------------------------------

bool Reducer::prepare_forward() {
  const auto lock = lock_after_abort();
  if (context_.phase == Phase::kFailed) {
    recover();
  }
  if (context_.phase == Phase::kCollecting) {
    if (scope_.empty() && !running_task::in_backward()) {
      const auto error =
          errors::backward_incomplete(context_.where(), context_.params.names_of(step_->missing()));
      fail();
      throw error;
    }
    return false;  // a forward within a backward, as checkpointing of the wrapper makes
  }
  context_.observer.peers().check();
  check_params();
  Indices never_came;
  for (const auto param_index : std::exchange(possibly_late_, {})) {
    if (!seen_[param_index]) {
      never_came.push_back(param_index);
    }
  }
  std::fill(seen_.begin(), seen_.end(), false);
  if (!never_came.empty()) {
    context_.raise(
        errors::params_without_gradient(context_.where(), context_.params.names_of(never_came)));
  }
  context_.observer.collect();
  emit(StepEvent::kForwardBegin);
  return rebuild_if_due();
}

void Reducer::begin_forward() {
  const auto lock = lock_after_abort();
  emit(StepEvent::kModuleForwardBegin);
}

void Reducer::watch_outputs(const std::vector<at::Tensor>& outputs) {
  const auto lock = lock_after_abort();
  emit(StepEvent::kForwardEnd);
  const auto forward = sync_enabled_ ? ForwardSync::kOn : ForwardSync::kOff;
  outputs_.watch(outputs, forward, weak_from_this());
}

// A param that was cast has lost its hook, and a param that was unfrozen never had a hook: the
// gradients of both would stay local silently.
void Reducer::check_params() {
  const auto changed = context_.params.restore_hooks(weak_from_this());
  if (!changed.empty()) {
    context_.raise(errors::params_changed(context_.where(), context_.params.names_of(changed)));
  }
  const auto unfrozen = context_.params.unfrozen();
  if (!unfrozen.empty()) {
    context_.raise(errors::params_unfrozen(context_.where(), unfrozen));
  }
}

// ---- buckets ------------------------------------------------------------------------------------

bool Reducer::rebuild_buckets() {
  const auto lock = lock_after_abort();
  if (context_.phase == Phase::kFailed) {
    recover();
  }
  return context_.phase == Phase::kIdle && rebuild_if_due();
}

bool Reducer::rebuild_if_due() {
  if (!context_.order.due()) {
    return false;
  }
  const ExclusiveMutex::Occupation occupation(context_.mutex);
  context_.go_to(Phase::kRebuilding);
  emit(StepEvent::kRebuildBegin);
  try {
    agreed_order_ = context_.communicate(
        [&] { return context_.order.agree(*context_.collective, context_.params.device()); },
        errors::order_broadcast);
    // From now on peers have the new plan. If the allocation fails, recover() allocates for it. The
    // old buckets are dropped first, so that no step needs the memory of both.
    context_.buckets.set_plan(context_.plan_by_arrival(agreed_order_));
    context_.order.retire();
    context_.replace_buckets(context_.buckets.plan());
  } catch (...) {
    fail();
    throw;
  }
  context_.go_to(Phase::kIdle);
  emit(StepEvent::kRebuildEnd);
  return true;
}

// ---- a step that broke off ----------------------------------------------------------------------

void Reducer::on_graph_task_abort(int task_id) noexcept {
  const auto lock = context_.mutex.lock_to_change();
  const ExclusiveMutex::Occupation occupation(context_.mutex);
  scope_.leave(task_id);
  if (!scope_.empty()) {
    return;
  }
  backward_sync_.end(sync_enabled_);
  if (context_.phase != Phase::kCollecting) {
    return;
  }
  context_.go_to(Phase::kFinalizing);
  // If the group has failed, peers finish no step either.
  const bool matched = !context_.observer.peers().group_failed() && step_->match_peers();
  auto unused_streaks = context_.use.unused_streaks;
  fail();
  if (matched) {
    context_.use.unused_streaks = std::move(unused_streaks);
  }
}

void Reducer::fail() noexcept {
  try {
    context_.go_to(Phase::kFailed);
    recover();
  } catch (...) {
    // Out of memory, for example. The next step calls recover() again and raises its error.
  }
}

void Reducer::recover() {
  auto& context = context_;
  step_.reset();
  context.params.links().pull_all();
  if (context.options.precision.compute) {
    context.buckets.wait_for_streams();
    for (std::size_t i = 0; i < context.params.size(); ++i) {
      context.cast_grad_to_local(i);
    }
  }
  // Peers may never launch what is in flight, so nothing is waited for: the backend keeps the old
  // buffers, which its work objects own.
  context.params.links().push_all();
  context.replace_buckets(context.buckets.plan());
  if (context.use_is_exchanged()) {
    context.use.forget(context.params.device());
  }
  possibly_late_.clear();
  context_.go_to(Phase::kIdle);
  context.observer.peers().break_off();
}

void Reducer::reset() {
  const auto lock = lock_after_abort();
  if (running_task::in_backward() || !scope_.empty()) {
    throw errors::inside_backward(context_.where(), "reset()");
  }
  backward_sync_ = {};
  if (context_.phase == Phase::kCollecting) {
    context_.go_to(Phase::kFailed);
  }
  if (context_.phase == Phase::kFailed) {
    recover();
  }
}

}  // namespace ddpx
