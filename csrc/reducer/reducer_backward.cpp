// The methods of Reducer for gradients and for the end of a backward.
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

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
    check_not_pending("a backward");
  }
  recover_in_backward();
  emit(StepEvent::kOutputReached);
  if (!sync_enabled_ && joined_step_ == JoinedStep::kAverages && forward == ForwardSync::kOn &&
      running_task::runs_whole_graph()) {
    throw context_.error(
        "in a join() context, forward ran outside no_sync() and announced to the other ranks that "
        "this step averages gradients, but backward runs inside no_sync(). Put the forward inside "
        "no_sync() as well to keep gradients local.");
  }
  const bool averages = sync_enabled_ && !params.hooks().empty();
  const bool returns_grads = running_task::returns_grads();
  if (!context_.script_grads.kept.empty() && !returns_grads && !running_task::is_distributed()) {
    check_kept_averages();
  }
  if (!returns_grads) {
    end_loss_if_cleared();
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
    context_.script_grads.taken.take(i, leaf, leaf.grad().defined() || forward_.arrived(i));
  }
}

void Reducer::on_grad(std::size_t param_index) {
  const auto lock = context_.mutex.lock_to_change();
  if (has_yielded()) {
    return;
  }
  recover_in_backward();
  if (context_.progress.phase != Phase::kCollecting && context_.progress.phase != Phase::kIdle) {
    refuse_grad(param_index);
  }
  context_.params.links().pull(param_index);
  const bool is_idle = context_.progress.phase == Phase::kIdle;
  if (is_idle && context_.options.average != Average::kMean && scope_.empty()) {
    begin_bypass();
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
  if (dist_grads_.active()) {
    dist_grads_.remember_context();
    dist_grads_.pull(context_.params.leaves()[param_index]);
  }
  context_.script_grads.early_updates.arrive(param_index, context_.params.leaves()[param_index]);
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
  check_joined_step();
  check_weights(context_);
  if (c10::GradMode::is_enabled()) {
    TORCH_WARN_ONCE(
        "backward(create_graph=True) through ReducerDDP: the gradients are averaged over ranks, "
        "but the graph of the gradients is local. Second-order gradients will not be averaged. "
        "Average second-order gradients with ReducerDDP.synchronized_grads().");
  }
  context_.observer.collect();
  if (running_task::is_distributed()) {
    check_dist_averages();
    dist_grads_.begin(context_.params.leaves());
  }
  context_.params.links().pull_all();
  step_.emplace(context_);
  context_.go_to(Phase::kCollecting);
  emit(StepEvent::kStepBegin);
  if (!context_.progress.captured) {
    forward_streams_.wait();
  }
  step_->begin();
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
      context_.go_to(Phase::kIdle);
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
    if (context_.settings.manual_finalization) {
      await_finalization(output_reached);
      return;
    }
    end_backward(output_reached);
    finish_step();
    after_sync = after_sync_;
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
    fail_with(error);
    throw;
  }
}

// No further gradient of the step will come.
void Reducer::end_backward(bool output_reached) {
  emit(StepEvent::kBackwardEnd);
  context_.go_to(Phase::kFinalizing);
  report_missing(output_reached);
}

// Ends the step in phase kFinalizing.
void Reducer::finish_step() {
  try {
    step_->finish();
  } catch (const std::exception& error) {
    fail_with(error);
    throw;
  }
  const bool in_dist_context = dist_grads_.active();
  dist_grads_.end(context_.params.leaves(), /*averaged=*/true);
  forward_.record(step_->arrivals());
  context_.history.arrivals.learn(step_->arrivals());
  if (context_.options.average != Average::kMean && !in_dist_context) {
    context_.script_grads.kept.record(context_.params.leaves());
  }
  const auto error = step_->error();
  step_.reset();
  end_step();
  emit(StepEvent::kStepEnd);
  context_.count_step();
  emit(StepEvent::kIdle);
  // Raised last, when the reducer can be used again.
  if (error) {
    context_.guard.publish_fault(error->what());
    context_.raise(*error);
  }
}

void Reducer::end_step() {
  context_.buckets.forget_streams();
  context_.progress.captured = false;
  context_.go_to(Phase::kIdle);
}

}  // namespace ddpx
