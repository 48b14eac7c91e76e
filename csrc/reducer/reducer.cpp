#include "reducer.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "../autograd/running_task.h"
#include "../buckets/device_stream.h"

namespace ddpx {
namespace {

bool in_backward() {
  return running_task::id() != running_task::kNone;
}

GraphTaskId this_task() {
  return {running_task::id(), running_task::depth()};
}

}  // namespace

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
  if (context_.phase != Phase::kIdle || in_backward()) {
    context_.params.abandon_hooks();
  }
}

// Peers learn of this wrapper.
void Reducer::register_with_group() {
  context_.observer.peers() =
      health::StepTracker(context_.collective->monitor(), [weak = weak_from_this()] {
        const auto self = weak.lock();
        return self ? self->missing_params() : std::vector<std::string>();
      });
  context_.publish_bucket_names();
  emit(StepEvent::kIdle);
}

void Reducer::check_idle(const char* call) const {
  if (context_.phase != Phase::kIdle) {
    throw errors::inside_backward(context_.where(), call);
  }
}

// For calls that raise within a backward.
Reducer::Lock Reducer::lock_between_steps() const {
  return context_.mutex.lock_to_change_or([this] {
    return context_.phase == Phase::kCollecting || context_.phase == Phase::kFinalizing;
  });
}

// ---- forward ------------------------------------------------------------------------------------

bool Reducer::prepare_forward() {
  const auto lock = context_.mutex.lock_to_change();
  if (context_.phase == Phase::kFailed) {
    recover();
  }
  if (context_.phase == Phase::kCollecting) {
    if (scope_.empty() && !in_backward()) {
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
  const auto lock = context_.mutex.lock_to_change();
  emit(StepEvent::kModuleForwardBegin);
}

void Reducer::watch_outputs(const std::vector<at::Tensor>& outputs) {
  const auto lock = context_.mutex.lock_to_change();
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
  const auto lock = context_.mutex.lock_to_change();
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

// ---- gradients arrive ---------------------------------------------------------------------------

void Reducer::on_output_grad(ForwardSync forward) {
  const auto lock = context_.mutex.lock_to_change();
  const auto& params = context_.params;
  emit(StepEvent::kOutputReached);
  if (!sync_enabled_ && joined_step_ == JoinedStep::kAverages && forward == ForwardSync::kOn &&
      running_task::runs_whole_graph()) {
    throw errors::joined_step_is_local(context_.where());
  }
  if (!sync_enabled_ || params.hooks().empty()) {
    if (context_.observer.recorded()) {
      scope_.track(weak_from_this());  // to record the end of the local backward
    }
    return;
  }
  scope_.track(weak_from_this());  // so that backward_sync_ is reset when this backward ends
  backward_sync_.reach_output(forward);
  if (backward_sync_.local()) {
    return;
  }
  Indices asked_for;
  for (std::size_t i = 0; i < params.hooks().size() && !running_task::runs_whole_graph(); ++i) {
    if (running_task::returns_grad_of(params.hooks()[i].accumulator())) {
      asked_for.push_back(i);
    }
  }
  if (!asked_for.empty()) {
    const auto names = params.names_of(asked_for);
    throw backward_sync_.prepared() ? errors::grads_taken_away(context_.where(), names)
                                    : errors::autograd_grad_of_params(context_.where(), names);
  }
  const auto local_arrivals = backward_sync_.take_local_arrivals();
  if (context_.phase == Phase::kIdle) {
    predict_unused();  // here, where the outermost graph task runs
  }
  if (context_.phase == Phase::kIdle && (!local_arrivals.empty() || reaches_nothing())) {
    begin_step();  // peers launch their buckets in the middle of backward: so must this rank
    context_.buckets.wait_for_streams();
  }
  for (const auto param_index : local_arrivals) {
    params.links().pull(param_index);  // pushed by an earlier arrival of the same param
    arrive(param_index);
  }
}

// Once per backward: the first tracked graph task counts.
void Reducer::predict_unused() {
  auto& prediction = context_.use.prediction;
  if (context_.options.mode == GraphMode::kFindUnused && !scope_.contains(prediction.task_id())) {
    prediction.begin(this_task(), running_task::unreached(context_.params.hooks()));
  }
}

// Whether the backward on this thread is known to bring no gradient at all.
bool Reducer::reaches_nothing() const {
  return context_.options.mode == GraphMode::kFindUnused && !context_.arrivals.learning() &&
         running_task::runs_whole_graph() && !context_.params.all_frozen() &&
         context_.use.prediction.reaches_nothing();
}

void Reducer::on_grad(std::size_t param_index) {
  const auto lock = context_.mutex.lock_to_change();
  if (context_.phase == Phase::kFailed) {
    recover();
  }
  context_.params.links().pull(param_index);
  if (context_.phase == Phase::kIdle && (!sync_enabled_ || backward_sync_.local())) {
    keep_local(param_index);
    return;
  }
  scope_.track(weak_from_this());  // first, so that an error below is reported as an abort
  if (context_.phase == Phase::kIdle) {
    predict_unused();
    if (context_.options.mode == GraphMode::kFindUnused) {
      // Before the step begins: an arrival in a nested task changes the prediction of other params.
      context_.use.prediction.record_arrival(param_index, this_task());
    }
    begin_step();
  }
  arrive(param_index);
}

void Reducer::keep_local(std::size_t param_index) {
  context_.mark_used(param_index);
  if (context_.options.mode == GraphMode::kFindUnused) {
    context_.use.prediction.record_local_arrival(param_index, this_task());
  }
  context_.cast_grad_to_local(param_index);
  context_.params.links().push(param_index);
  if (sync_enabled_) {
    backward_sync_.keep_local(param_index);
    context_.add_stream_of(param_index);
  }
}

void Reducer::arrive(std::size_t param_index) {
  if (context_.options.mode == GraphMode::kFindUnused) {
    context_.use.prediction.record_arrival(param_index, this_task());
  }
  step_->arrive(param_index);
}

// autograd.grad() takes the gradient of a param away, in the backward that prepare_for_backward()
// was called for.
void Reducer::on_grad_to_come(std::size_t param_index) {
  if (running_task::runs_whole_graph()) {
    return;
  }
  const auto lock = context_.mutex.lock_to_change();
  const auto& hooks = context_.params.hooks();
  if (sync_enabled_ && backward_sync_.prepared() && param_index < hooks.size() &&
      running_task::returns_grad_of(hooks[param_index].accumulator())) {
    scope_.track(weak_from_this());
    throw errors::grads_taken_away(context_.where(), context_.params.names_of({param_index}));
  }
}

void Reducer::begin_step() {
  context_.observer.peers().check();
  check_capture();
  check_params();
  check_joined_step();
  if (c10::GradMode::is_enabled()) {
    TORCH_WARN_ONCE(
        "backward(create_graph=True) through ReducerDDP: the gradients are averaged over ranks, "
        "but the graph of the gradients is local. Second-order gradients will not be averaged. "
        "Average second-order gradients with ReducerDDP.synchronized_grads().");
  }
  context_.observer.collect();
  context_.params.links().pull_all();
  predict_unused();
  step_.emplace(context_, Step::Kind::kWithGrads);
  context_.go_to(Phase::kCollecting);
  emit(StepEvent::kStepBegin);
  step_->begin();
}

// Ranks without inputs make the step that the forward of this rank has announced.
void Reducer::check_joined_step() {
  if (joined_step_ == JoinedStep::kLocal) {
    throw errors::joined_step_averages(context_.where());
  }
  auto announced = JoinedStep::kAverages;  // leave_join() may come in between
  joined_step_.compare_exchange_strong(announced, JoinedStep::kUnannounced);
}

void Reducer::check_capture() const {
  const bool reads_on_host =
      context_.options.mode == GraphMode::kFindUnused || context_.settings.check_finite;
  if (reads_on_host && is_capturing(context_.params.device())) {
    refuse_capture();
  }
}

void Reducer::refuse_capture() const {
  const auto lock = context_.mutex.lock();
  if (context_.settings.check_finite) {
    throw errors::under_capture(context_.where(), "set_check_finite()");
  }
  if (context_.options.mode == GraphMode::kFindUnused) {
    throw errors::under_capture(context_.where(), "find_unused_parameters");
  }
}

// ---- the end of backward ------------------------------------------------------------------------

void Reducer::on_outer_task() {
  const auto lock = context_.mutex.lock_to_change();
  if (context_.phase == Phase::kCollecting) {
    scope_.track(weak_from_this());
  }
}

void Reducer::on_graph_task_end(int task_id) {
  std::function<void()> after_sync;
  {
    const auto lock = context_.mutex.lock_to_change();
    scope_.leave(task_id);
    if (!scope_.empty()) {
      return;
    }
    const bool whole_graph = running_task::runs_whole_graph();
    const bool output_reached = backward_sync_.output_reached();
    backward_sync_.end(sync_enabled_ && (context_.phase == Phase::kCollecting || whole_graph));
    if (context_.phase == Phase::kIdle && output_reached && sync_enabled_ && whole_graph &&
        !context_.params.all_frozen()) {
      const ExclusiveMutex::Occupation occupation(context_.mutex);  // no task is tracked any more
      begin_empty_step();
    }
    if (context_.phase != Phase::kCollecting) {
      if (!output_reached) {
        emit(StepEvent::kLocalBackwardEnd);
      }
      return;
    }
    if (running_task::is_nested() && !step_->unfinished().empty()) {
      // The wrapper's forward was bypassed, so the outer task is not tracked. It may bring the
      // rest.
      if (BackwardScope::hook_outer_task(weak_from_this()) ||
          (!output_reached && !step_->missing().empty())) {
        return;
      }
    }
    const ExclusiveMutex::Occupation occupation(context_.mutex);
    finish_step(output_reached);
    after_sync = after_sync_;
  }
  if (after_sync) {
    after_sync();
  }
}

// The loss of this rank reaches no param, but peers may wait for this rank.
void Reducer::begin_empty_step() {
  try {
    begin_step();
  } catch (...) {
    if (context_.phase == Phase::kCollecting) {
      fail();
    }
    throw;
  }
}

void Reducer::finish_step(bool output_reached) {
  emit(StepEvent::kBackwardEnd);
  const auto missing = missing_at_end();
  context_.go_to(Phase::kFinalizing);
  const auto where = context_.where();
  try {
    step_->finish();
  } catch (...) {
    fail();
    throw;
  }
  for (std::size_t i = 0; i < seen_.size(); ++i) {
    seen_[i] = seen_[i] || step_->arrivals().arrived(i);
  }
  context_.arrivals.learn(step_->arrivals());
  const auto error = step_->error();
  end_step();
  // Raised last, when the reducer can be used again.
  if (error) {
    context_.raise(*error);
  }
  report_missing(where, missing, output_reached);
}

void Reducer::end_step() {
  const bool with_grads = step_->kind() == Step::Kind::kWithGrads;
  context_.use.static_use_known = true;
  step_.reset();
  context_.go_to(Phase::kIdle);
  if (with_grads) {
    emit(StepEvent::kStepEnd);
  } else {
    context_.observer.clock().skip_step();
  }
  ++context_.num_steps;
  emit(StepEvent::kIdle);
}

// Delayed params may be unused, as in DDP.
Reducer::Indices Reducer::missing_at_end() const {
  if (context_.options.mode == GraphMode::kFindUnused ||
      (context_.arrivals.learning() && context_.options.mode != GraphMode::kDefault)) {
    return {};
  }
  auto missing = step_->missing();
  const auto is_delayed = [this](std::size_t i) { return context_.params.metas()[i].delayed; };
  missing.erase(std::remove_if(missing.begin(), missing.end(), is_delayed), missing.end());
  return missing;
}

void Reducer::report_missing(
    const errors::Where& where, const Indices& missing, bool output_reached) {
  if (missing.empty()) {
    return;
  }
  const auto& params = context_.params;
  if (context_.options.mode == GraphMode::kStatic) {
    context_.raise(errors::static_graph_changed(where, params.names_of(missing), missing));
  }
  // Another output of the same forward may have brought them, or may still bring them.
  const auto nodes_to_come = outputs_.nodes_to_come();
  Indices unused;
  possibly_late_.clear();
  for (const auto param_index : missing) {
    if (output_reached && seen_[param_index]) {
      continue;
    }
    const bool to_come = nodes_to_come.count(params.hooks()[param_index].accumulator()) != 0;
    (to_come ? possibly_late_ : unused).push_back(param_index);
  }
  if (!unused.empty()) {
    context_.raise(errors::params_without_gradient(where, params.names_of(unused)));
  }
}

void Reducer::shadow_step() {
  const auto lock = context_.mutex.lock_to_change();
  const ExclusiveMutex::Occupation occupation(context_.mutex);
  if (context_.phase == Phase::kFailed) {
    recover();
  }
  context_.observer.peers().check();
  check_idle("join()");
  context_.go_to(Phase::kCollecting);
  context_.observer.clock().begin_step();
  context_.observer.peers().begin_step(context_.step_number());
  context_.go_to(Phase::kFinalizing);
  try {
    step_.emplace(context_, Step::Kind::kWithoutGrads);
    step_->begin();
    step_->finish();
  } catch (...) {
    fail();
    throw;
  }
  const auto error = step_->error();
  end_step();
  if (error) {
    context_.raise(*error);
  }
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
  auto lock = context_.mutex.lock_to_change();
  if (in_backward()) {
    throw errors::inside_backward(context_.where(), "reset()");
  }
  context_.mutex.wait(lock, [this] { return !step_ || !step_->launching(); });
  backward_sync_ = {};
  if (context_.phase == Phase::kCollecting) {
    context_.go_to(Phase::kFailed);
  }
  if (context_.phase == Phase::kFailed) {
    recover();
  }
}

// ---- settings -----------------------------------------------------------------------------------

void Reducer::set_comm_hook(std::shared_ptr<CommHook> hook) {
  const auto lock = context_.mutex.lock_to_change();
  if (context_.settings.comm_hook) {
    context_.raise(errors::second_comm_hook(context_.where()));
  }
  check_idle("register_comm_hook()");
  const bool had_buckets = context_.communicates();
  context_.settings.comm_hook = std::move(hook);
  if (!had_buckets) {
    try {
      context_.replace_buckets(context_.buckets.plan());
    } catch (...) {
      context_.settings.comm_hook.reset();
      throw;
    }
  }
}

void Reducer::set_mixed_precision(Precision precision, std::shared_ptr<CommHook> hook) {
  const auto lock = context_.mutex.lock_to_change();
  set_comm_hook(std::move(hook));
  context_.options.precision = precision;
  context_.replace_buckets(context_.buckets.plan());
}

void Reducer::set_divisor(std::optional<int> divisor) {
  const auto lock = context_.mutex.lock();
  context_.settings.set_divisor(divisor);
}

void Reducer::set_sparse_rows(std::size_t param_index, const at::Tensor& rows) {
  const auto lock = context_.mutex.lock();
  context_.settings.set_sparse_rows(context_.params, param_index, rows);
}

void Reducer::announce_joined_step(bool averages) {
  const auto lock = context_.mutex.lock_to_change();
  if (averages || joined_step_ != JoinedStep::kAverages) {
    joined_step_ = averages ? JoinedStep::kAverages : JoinedStep::kLocal;
  }
}

void Reducer::set_check_finite(bool enabled) {
  const auto lock = lock_between_steps();
  check_idle("set_check_finite()");
  context_.settings.check_finite = enabled;
}

void Reducer::set_after_sync(std::function<void()> after_sync) {
  const auto lock = context_.mutex.lock();
  after_sync_.swap(after_sync);  // the old function is destroyed without the lock
}

void Reducer::set_static_graph() {
  const auto lock = context_.mutex.lock_to_change();
  if (context_.options.mode == GraphMode::kStatic) {
    return;
  }
  if (context_.phase != Phase::kIdle || !context_.arrivals.learning()) {
    context_.raise(errors::static_graph_too_late(context_.where()));
  }
  context_.start_over(GraphMode::kStatic, context_.collective, context_.num_steps);
}

void Reducer::prepare_for_backward() {
  const auto lock = context_.mutex.lock_to_change();
  if (in_backward()) {
    throw errors::inside_backward(context_.where(), "prepare_for_backward()");
  }
  if (joined_step_ == JoinedStep::kLocal || joined_step_ == JoinedStep::kUnannounced) {
    throw errors::prepared_in_join(context_.where());
  }
  backward_sync_.prepare();
  context_.params.add_pre_hooks(weak_from_this());
}

void Reducer::remove_hooks() {
  const auto lock = context_.mutex.lock_to_change();
  if (context_.phase != Phase::kIdle || in_backward()) {
    throw errors::hooks_in_use(context_.where());
  }
  context_.params.remove_hooks();
}

void Reducer::set_collective(
    std::shared_ptr<Collective> collective, std::optional<int64_t> num_steps) {
  const auto lock = context_.mutex.lock_to_change();
  if (context_.phase == Phase::kCollecting || context_.phase == Phase::kFinalizing) {
    throw errors::inside_backward(context_.where(), "_update_process_group()");
  }
  context_.start_over(
      context_.options.mode, std::move(collective), num_steps.value_or(context_.num_steps));
  agreed_order_.clear();
  register_with_group();
}

// ---- observers and state ------------------------------------------------------------------------

void Reducer::add_recording(std::shared_ptr<Recording> recording) {
  const auto lock = lock_between_steps();
  check_idle("ddpx.record()");
  context_.observer.add_recording(
      std::move(recording), context_.step_number(), context_.buckets.plan());
}

void Reducer::remove_recording(const std::shared_ptr<Recording>& recording) {
  const auto lock = context_.mutex.lock();
  context_.observer.remove_recording(recording);
}

void Reducer::set_sample_rate(int64_t sample_rate) {
  if (sample_rate < 1) {
    throw errors::not_positive("the sample rate", sample_rate);
  }
  const auto lock = context_.mutex.lock();
  context_.observer.clock().set_sample_rate(sample_rate);
}

void Reducer::number_as_constructed() {
  const auto lock = context_.mutex.lock_to_change();
  context_.observer.peers().number_as_constructed();
  emit(StepEvent::kIdle);
}

void Reducer::continue_from(Reducer& older) {
  int64_t num_steps = 0;
  std::vector<std::shared_ptr<Recording>> recordings;
  health::StepTracker peers;
  {
    const auto lock = older.context_.mutex.lock_to_change();
    peers = older.context_.observer.peers();
    num_steps = older.context_.num_steps;
    recordings = older.context_.observer.take_recordings();
  }
  const auto lock = context_.mutex.lock_to_change();
  context_.num_steps = num_steps;
  context_.observer.peers().continue_from(peers);
  for (auto& recording : recordings) {
    add_recording(std::move(recording));
  }
}

std::vector<int32_t> Reducer::used_by_ranks() {
  const auto lock = context_.mutex.lock();
  auto& use = context_.use;
  // A thread that finalizes a step may wait for this one, as for the continuation of a hook's
  // future.
  if (!context_.mutex.occupied_by_other()) {
    const ExclusiveMutex::Occupation occupation(context_.mutex);
    context_.communicate([&] { use.map.wait(); }, errors::used_map_exchange);
    use.last_sums = use.map.last_sums();
  }
  return context_.communicate(
      [sums = use.last_sums] { return sums.num_ranks_using(); }, errors::used_map_exchange);
}

std::vector<std::string> Reducer::missing_params() {
  const auto lock = context_.mutex.try_lock();
  return lock && context_.phase == Phase::kCollecting && step_
             ? context_.params.names_of(step_->missing())
             : std::vector<std::string>();
}

}  // namespace ddpx
