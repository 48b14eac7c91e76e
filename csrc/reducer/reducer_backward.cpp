// The methods of Reducer for gradients and for the end of a backward.
#include <exception>

#include "../autograd/running_task.h"
#include "../buckets/device_stream.h"
#include "capture_checks.h"
#include "reducer.h"
#include "step_checks.h"

namespace ddpx {

// ---- gradients arrive ---------------------------------------------------------------------------

void Reducer::on_output_grad(ForwardSync forward) {
  const auto lock = context_.mutex.lock_to_change();
  const auto& params = context_.params;
  if (running_task::runs_whole_graph()) {
    steps_.check_not_pending("a backward");
  }
  steps_.recover_in_backward();
  context_.emit(StepEvent::kOutputReached);
  if (!sync_enabled_ && forward == ForwardSync::kOn && running_task::runs_whole_graph()) {
    join_announcement_.check_local(context_);
  }
  const bool averages = sync_enabled_ && !params.hooks().empty();
  const bool returns_grads = running_task::returns_grads();
  if (!returns_grads) {
    check_averages_cleared();
    accumulated_.end_loss_if_cleared();
  }
  if (averages && returns_grads && (forward != ForwardSync::kOff || backward_sync_.prepared())) {
    take_grads();
  }
  if (!averages || returns_grads) {
    const bool weighs = context_.options.average == Average::kWeights && !returns_grads;
    if ((context_.observer.recorded() || weighs) && context_.progress.phase == Phase::kIdle) {
      scope_.track(weak_from_this());  // to record the end of the local backward; for its abort
    }
    return;
  }
  scope_.track(weak_from_this());  // so that backward_sync_ is reset when this backward ends
  const bool is_first_output = !backward_sync_.output_reached();
  backward_sync_.reach_output(forward);
  if (is_first_output && backward_sync_.output_reached() && context_.communicates()) {
    context_.script_grads.early_updates.watch_hooked(params.leaves());
  }
  if (backward_sync_.local()) {
    return;
  }
  if (has_yielded()) {
    reclaim();
    if (has_yielded()) {
      return;
    }
  }
  const auto local_arrivals = backward_sync_.take_local_arrivals();
  if (context_.progress.phase == Phase::kIdle) {
    predict_unused();  // here, where the outermost graph task runs
  }
  if (context_.progress.phase == Phase::kIdle && (!local_arrivals.empty() || reaches_nothing())) {
    begin_step();  // peers launch their buckets in the middle of backward: so must this rank
    context_.buckets.wait_for_streams();
  }
  for (const auto param_index : local_arrivals) {
    params.links().pull(param_index);  // pushed by an earlier arrival of the same param
    arrive(param_index);
  }
}

// autograd.grad() returns gradients of this rank alone.
void Reducer::take_grads() {
  const auto& params = context_.params;
  Indices taken;
  for (std::size_t i = 0; i < params.hooks().size(); ++i) {
    if (running_task::returns_grad_of(params.hooks()[i].accumulator())) {
      taken.push_back(i);
    }
  }
  if (!taken.empty() && backward_sync_.prepared()) {
    scope_.track(weak_from_this());
    throw errors::grads_taken_away(context_.where(), params.names_of(taken));
  }
  if (taken.empty() || context_.collective->alone() || has_yielded()) {
    return;
  }
  if (context_.script_grads.taken.empty()) {
    context_.script_grads.taken.start(
        params.leaves(), /*averaged=*/context_.progress.num_steps > 0);
  }
  for (const auto i : taken) {
    const auto& leaf = params.leaves()[i];
    context_.script_grads.taken.take(
        i, leaf, leaf.grad().defined() || context_.history.forward.arrived(i));
  }
}

void Reducer::on_grad(std::size_t param_index) {
  const auto lock = context_.mutex.lock_to_change();
  if (has_yielded()) {
    return;
  }
  steps_.recover_in_backward();
  if (context_.progress.phase != Phase::kCollecting && context_.progress.phase != Phase::kIdle) {
    steps_.refuse_grad(param_index);
  }
  context_.params.links().pull(param_index);
  const bool is_idle = context_.progress.phase == Phase::kIdle;
  if (is_idle && context_.options.average != Average::kMean && scope_.empty()) {
    check_averages_cleared();
    context_.weights.count_bypass();  // no output was reached
  }
  if (is_idle && (!sync_enabled_ || backward_sync_.local())) {
    keep_local(param_index);
    return;
  }
  scope_.track(weak_from_this());  // first, so that an error below is reported as an abort
  if (is_idle) {
    predict_unused();
    // Before the step begins: an arrival in a nested task changes the prediction of other params.
    record_arrival(param_index);
    begin_step();
  }
  arrive(param_index);
}

void Reducer::keep_local(std::size_t param_index) {
  if (running_task::is_distributed()) {
    dist_grads_.remember_context();
    if (sync_enabled_) {
      backward_sync_.keep_local(param_index);
    }
    return;
  }
  context_.mark_used_locally(param_index);
  record_arrival(param_index, /*kept_local=*/true);
  context_.cast_grad_to_local(param_index);
  context_.params.links().push(param_index);
  if (sync_enabled_) {
    backward_sync_.keep_local(param_index);
    context_.add_stream_of(param_index);
  }
}

void Reducer::arrive(std::size_t param_index) {
  record_arrival(param_index);
  steps_.arrive(param_index);
}

void Reducer::check_averages_cleared() {
  if (const auto error = accumulated_.find_averages()) {
    scope_.track(weak_from_this());  // so that the error is reported as an abort
    context_.raise(*error);
  }
}

// autograd.grad() takes the gradient of a param away, in the backward that prepare_for_backward()
// was called for.
void Reducer::on_grad_to_come(std::size_t param_index) {
  if (running_task::runs_whole_graph()) {
    return;
  }
  const auto lock = context_.mutex.lock_to_change();
  const auto& hooks = context_.params.hooks();
  if (sync_enabled_ && !has_yielded() && backward_sync_.prepared() && param_index < hooks.size() &&
      running_task::returns_grad_of(hooks[param_index].accumulator())) {
    scope_.track(weak_from_this());
    throw errors::grads_taken_away(context_.where(), context_.params.names_of({param_index}));
  }
}

void Reducer::begin_step() {
  check_peers(context_);
  check_owner();
  if (is_capturing(context_.params.device())) {
    context_.progress.captured = true;
    refuse_capture(context_, sync_enabled_);
  }
  check_params(context_, weak_from_this());
  join_announcement_.begin_step(context_);
  check_weights(context_);
  if (running_task::is_distributed()) {
    dist_grads_.remember_context();
    accumulated_.check_dist_averages();
  }
  steps_.begin();
}

// ---- the end of backward ------------------------------------------------------------------------

void Reducer::on_outer_task() {
  const auto lock = context_.mutex.lock_to_change();
  if (context_.progress.phase == Phase::kCollecting) {
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
    const bool expects_grads = backward_sync_.expects_grads();
    const bool made_step = context_.progress.phase == Phase::kCollecting ||
                           context_.progress.phase == Phase::kFinalized;
    backward_sync_.end(sync_enabled_ && (made_step || whole_graph));
    if (context_.progress.phase == Phase::kFinalized) {
      steps_.leave_backward();
      return;
    }
    if (context_.progress.phase == Phase::kIdle && expects_grads && sync_enabled_ && whole_graph &&
        !has_yielded() && !context_.params.all_frozen()) {
      const ExclusiveMutex::Occupation occupation(context_.mutex);  // no task is tracked any more
      begin_empty_step();
    }
    if (context_.progress.phase != Phase::kCollecting) {
      if (!running_task::is_nested()) {  // a step may begin later in the outer task
        context_.buckets.forget_streams();
      }
      if (!expects_grads) {
        context_.emit(StepEvent::kLocalBackwardEnd);
      }
      return;
    }
    if (running_task::is_nested() && !steps_.step()->unfinished().empty()) {
      // The wrapper's forward was bypassed, so the outer task is not tracked. It may bring the
      // rest.
      if (BackwardScope::hook_outer_task(weak_from_this()) ||
          (!output_reached && !steps_.step()->missing().empty())) {
        return;
      }
    }
    const ExclusiveMutex::Occupation occupation(context_.mutex);
    if (context_.settings.manual_finalization) {
      steps_.await_finalization(output_reached, outputs_);
      return;
    }
    steps_.end_backward(output_reached, outputs_);
    steps_.finish();
    after_sync = context_.settings.after_sync;
  }
  call_after_sync(after_sync);
}

// Without the mutex. Tells peers of an error, because they may wait for this rank in the next step.
void Reducer::call_after_sync(const std::function<void()>& after_sync) {
  if (!after_sync) {
    return;
  }
  try {
    after_sync();
  } catch (const std::exception& error) {
    const auto lock = context_.mutex.lock();
    context_.guard.publish_fault(error.what());
    throw;
  }
}

// The loss of this rank reaches no param, but peers may wait for this rank.
void Reducer::begin_empty_step() {
  try {
    begin_step();
  } catch (const std::exception& error) {
    steps_.fail_with(error);
    throw;
  }
}

void Reducer::on_graph_task_abort(int task_id, const std::string& cause) noexcept {
  const auto lock = context_.mutex.lock_to_change();
  const ExclusiveMutex::Occupation occupation(context_.mutex);
  scope_.leave(task_id);
  if (!scope_.empty()) {
    return;
  }
  if (backward_sync_.output_reached()) {
    context_.history.forward.end_forward();  // the script knows of the error
  }
  backward_sync_.end(sync_enabled_);
  steps_.leave_backward();
  if (context_.progress.phase == Phase::kCollecting) {
    steps_.abandon();
  }
  context_.weights.break_off();
  if (sync_enabled_) {
    context_.guard.publish_fault(cause);
  }
}

}  // namespace ddpx
