#include "reducer.h"

#include <exception>
#include <utility>

#include "../autograd/running_task.h"
#include "../buckets/device_stream.h"
#include "capture_checks.h"
#include "step_checks.h"

namespace ddpx {

// ---- construction and destruction ---------------------------------------------------------------

std::shared_ptr<Reducer> Reducer::create(
    const std::vector<ReducerParam>& params,
    ReducerOptions options,
    std::shared_ptr<Collective> collective,
    std::vector<ReducerParam> frozen_params,
    std::shared_ptr<health::Monitor> monitor) {
  Params checked(params, std::move(frozen_params));
  if (options.delay_trigger && *options.delay_trigger >= params.size()) {
    throw errors::no_such_param(*options.delay_trigger, params.size());
  }
  std::shared_ptr<Reducer> reducer(
      new Reducer(std::move(checked), std::move(options), std::move(collective)));
  reducer->context_.params.attach_hooks(reducer);
  reducer->publish_to(std::move(monitor));
  return reducer;
}

Reducer::Reducer(Params params, ReducerOptions options, std::shared_ptr<Collective> collective)
    : for_watchdog_(std::make_shared<Revocable<Reducer>>(this)),
      context_(std::move(params), std::move(options), std::move(collective)),
      steps_(context_, dist_grads_),
      accumulated_(context_, dist_grads_) {
  context_.replace_buckets(context_.buckets.plan());
}

Reducer::~Reducer() {
  for_watchdog_->revoke();
  try {
    context_.buckets.keep_for_streams();
  } catch (const std::exception&) {
    // The device has failed, so no stream uses the buckets any more.
  }
  abandon_backwards();
  const auto phase = context_.progress.phase;
  const bool in_step = phase != Phase::kIdle && phase != Phase::kReady && phase != Phase::kFailed;
  if (in_step || in_backward()) {
    context_.params.abandon_hooks();
  }
}

// The backward that runs, and later backwards of earlier forwards, leave gradients local.
void Reducer::abandon_backwards() noexcept {
  if (context_.params.hooks().empty() || has_yielded() || !context_.communicates()) {
    return;
  }
  try {
    const auto error =
        errors::deleted_before_backward(context_.where(), context_.options.module_name);
    outputs_.abandon(error);
    const auto phase = context_.progress.phase;
    if (phase == Phase::kCollecting || (phase == Phase::kIdle && backward_sync_.expects_grads())) {
      scope_.abandon(error);
    }
  } catch (const std::exception&) {
    // Out of memory, for example.
  }
}

// Peers of this failure detector learn of this wrapper.
void Reducer::publish_to(std::shared_ptr<health::Monitor> monitor) {
  health::StepTracker peers(
      monitor, {.params = context_.params.names(), .missing_params = [access = for_watchdog_] {
                  return access->with([](Reducer& reducer) { return reducer.missing_params(); });
                }});
  context_.observer.publish(
      std::move(peers), context_.params.devices(), context_.progress.num_steps);
  context_.guard = health::StepGuard(std::move(monitor));
  context_.publish_bucket_names();
  context_.emit(StepEvent::kIdle);
}

void Reducer::check_idle(const char* call) {
  steps_.check_not_pending(call);
  steps_.recover_if_failed();
  if (context_.progress.phase != Phase::kIdle) {
    throw errors::inside_backward(context_.where(), call);
  }
}

// Whether a backward runs on this thread, or runs on any thread and has reached this reducer.
bool Reducer::in_backward() const {
  return running_task::in_backward() || !scope_.empty();
}

void Reducer::check_outside_backward(const char* call) const {
  if (in_backward()) {
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
    const bool in_step = context_.progress.phase == Phase::kCollecting ||
                         context_.progress.phase == Phase::kFinalizing;
    return !awaits_abort() && (in_step || !context_.mutex.occupied_by_other());
  });
}

// ---- forward ------------------------------------------------------------------------------------

bool Reducer::prepare_forward(bool captured) {
  const auto lock = lock_after_abort();
  context_.progress.captured = captured || is_capturing(context_.params.device());
  context_.observer.set_captured(context_.progress.captured);
  if (context_.progress.captured) {
    refuse_capture(context_, sync_enabled_);
  }
  context_.observer.peers().publish_thread();
  context_.progress.awaited.begin_forward(context_.progress.num_steps);
  settle("a forward");
  if (context_.progress.phase == Phase::kCollecting ||
      context_.progress.phase == Phase::kFinalized) {
    return false;  // a forward within a backward, as checkpointing of the wrapper makes
  }
  steps_.remember_streams();
  check_peers(context_);
  check_params(context_, weak_from_this());
  const auto diverged = context_.script_grads.taken.pop_changed(context_.params.leaves());
  if (!diverged.empty()) {
    const auto count = diverged.size();
    context_.raise(
        errors::count_params(count) +
        " changed in place after torch.autograd.grad() had returned " +
        errors::by_number(count, "the local gradient", "local gradients") + " of this rank (" +
        join_names(context_.params.names_of(diverged)) + "). No backward has averaged " +
        errors::by_number(count, "a gradient of this parameter", "gradients of these parameters") +
        " in between, so ranks may now have different parameters. For averaged gradients, call "
        "model.synchronized_grads(loss, tensors). If ranks may differ for a while, if the script "
        "averages the gradients itself, or if it changes parameters by something else, call "
        "torch.autograd.grad() inside model.no_sync().");
  }
  const auto never_came = context_.history.forward.never_came();
  context_.history.forward.restart();
  if (!never_came.empty()) {
    context_.raise(
        errors::params_without_gradient(
            context_.where(), context_.params.names_of(never_came), never_came));
  }
  const bool weighs = context_.options.average == Average::kWeights;
  if (weighs && !context_.weights.is_set() && !running_task::in_backward()) {
    context_.raise(
        errors::weight_missing(
            context_.where(), context_.options.module_name, /*in_backward=*/false));
  }
  context_.history.had_forward = true;
  context_.observer.collect();
  context_.emit(StepEvent::kForwardBegin);
  return steps_.rebuild_if_due();
}

bool Reducer::rebuild_buckets() {
  const auto lock = lock_after_abort();
  steps_.check_not_pending("_rebuild_buckets()");
  steps_.recover_if_failed();
  return context_.progress.phase == Phase::kIdle && steps_.rebuild_if_due();
}

void Reducer::begin_forward() {
  const auto lock = lock_after_abort();
  context_.emit(StepEvent::kModuleForwardBegin);
}

void Reducer::watch_outputs(const std::vector<at::Tensor>& outputs, bool params_replaced) {
  const auto lock = lock_after_abort();
  context_.emit(StepEvent::kForwardEnd);
  const bool may_be_local = params_replaced && !join_announcement_.averages();
  const auto averaging = may_be_local ? ForwardSync::kReplaced : ForwardSync::kOn;
  if (sync_enabled_) {
    context_.history.forward.await_backward();
  }
  const auto forward = sync_enabled_ ? averaging : ForwardSync::kOff;
  accumulated_.count_weight(outputs_.watch(outputs, forward, weak_from_this()));
}

void Reducer::set_weight(double number) {
  const auto lock = lock_after_abort();
  accumulated_.set_weight(number);
}

void Reducer::set_weight(const at::Tensor& tensor) {
  const auto lock = lock_after_abort();
  accumulated_.set_weight(tensor);
}

void Reducer::prepare_for_backward() {
  const auto lock = lock_after_abort();
  check_outside_backward("prepare_for_backward()");
  steps_.check_not_pending("prepare_for_backward()");
  join_announcement_.check_prepare(context_);
  backward_sync_.prepare();
  context_.params.add_pre_hooks(weak_from_this());
}

// ---- the end of a step by the script ------------------------------------------------------------

void Reducer::shadow_step() {
  const auto lock = lock_after_abort();
  const ExclusiveMutex::Occupation occupation(context_.mutex);
  steps_.recover_if_failed();
  check_peers(context_);
  check_idle("join()");
  steps_.run_empty();
}

void Reducer::finalize_backward() {
  std::function<void()> after_sync;
  {
    const auto lock = context_.mutex.lock_when([this] {
      return !awaits_abort() &&
             (context_.progress.phase == Phase::kFinalizing || !context_.mutex.occupied_by_other());
    });
    // The backward of a watched output runs, and no gradient has come yet.
    const bool begins = context_.progress.phase == Phase::kIdle && sync_enabled_ &&
                        !scope_.empty() && backward_sync_.output_reached();
    steps_.check_can_finalize(begins);
    const ExclusiveMutex::Occupation occupation(context_.mutex);
    steps_.finalize(/*in_backward=*/!scope_.empty(), backward_sync_.output_reached(), outputs_);
    after_sync = context_.settings.after_sync;
  }
  call_after_sync(after_sync);
}

// Ends what an earlier backward has left behind. UserError if that backward did not end, or if its
// step awaits finalize_backward().
void Reducer::settle(const char* call) {
  steps_.check_not_pending(call);
  steps_.recover_if_failed();
  if (context_.progress.phase == Phase::kCollecting && scope_.empty() &&
      !running_task::in_backward()) {
    steps_.drop_incomplete();
  }
}

void Reducer::reset() {
  const auto lock = lock_after_abort();
  check_outside_backward("reset()");
  backward_sync_ = {};
  context_.history.forward.end_forward();
  context_.script_grads.taken.clear();
  accumulated_.forget_weights();
  steps_.reset();
}

// ---- between steps ------------------------------------------------------------------------------

void Reducer::set_manual_finalization(bool required) {
  const auto lock = lock_between_steps();
  if (required == context_.settings.manual_finalization) {
    return;
  }
  steps_.check_not_pending("a change of require_manual_backward_finalization");
  steps_.recover_if_failed();
  if (context_.progress.phase != Phase::kIdle || context_.history.forward.awaits_backward() ||
      !scope_.empty()) {
    context_.raise(
        "require_manual_backward_finalization cannot be changed after forward while a backward "
        "pass is expected or in progress. Set it before forward or after backward finalization. If "
        "the last forward has no backward, call model.reset() first.");
  }
  context_.settings.manual_finalization = required;
}

void Reducer::set_static_graph() {
  const auto lock = lock_between_steps();
  if (context_.options.mode == GraphMode::kStatic) {
    return;
  }
  check_idle("_set_static_graph()");
  check_outside_backward("_set_static_graph()");
  if (!context_.history.arrivals.learning()) {
    context_.raise(
        "_set_static_graph() should be called before training loop starts. The first synchronized "
        "backward of this wrapper has ended already. Pass static_graph=True when wrapping.");
  }
  context_.start_over(GraphMode::kStatic, context_.collective, context_.progress.num_steps);
}

void Reducer::set_collective(
    std::shared_ptr<Collective> collective,
    std::optional<int64_t> num_steps,
    std::shared_ptr<health::Monitor> monitor) {
  std::shared_ptr<Collective> before;  // destroyed without the mutex: a group joins its threads
  const auto lock = lock_after_abort();
  check_outside_backward("_update_process_group()");
  if (context_.progress.phase != Phase::kFailed) {
    check_idle("_update_process_group()");
  }
  before = context_.collective;
  steps_.move_to(std::move(collective), num_steps.value_or(context_.progress.num_steps));
  publish_to(std::move(monitor));
  steps_.recover_if_failed();
}

void Reducer::use_buckets(std::vector<std::vector<std::size_t>> buckets) {
  const auto lock = lock_after_abort();
  check_idle("use_buckets()");  // no backward of this wrapper runs, but for the end of one
  if (!scope_.empty()) {
    throw errors::inside_backward(context_.where(), "use_buckets()");
  }
  auto plan = BucketPlan::listed(context_.params.metas(), std::move(buckets));
  steps_.rebuild([&] { return std::move(plan); });
}

void Reducer::remove_hooks() {
  const auto lock = lock_after_abort();
  steps_.check_not_pending("_remove_autograd_hooks()");
  steps_.recover_if_failed();
  if (context_.progress.phase != Phase::kIdle || in_backward()) {
    throw context_.error(
        "hooks cannot be removed while a backward runs. Remove the hooks between steps.");
  }
  context_.params.remove_hooks();
  context_.history.forward.restart();  // no later gradient is seen
}

std::vector<std::string> Reducer::missing_params() {
  const auto lock = context_.mutex.try_lock();
  return lock && context_.progress.phase == Phase::kCollecting && steps_.step()
             ? context_.params.names_of(steps_.step()->missing())
             : std::vector<std::string>();
}

}  // namespace ddpx
