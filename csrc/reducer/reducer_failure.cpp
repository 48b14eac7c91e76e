// The methods of Reducer for a step that broke off.
#include <exception>
#include <utility>

#include "../autograd/running_task.h"
#include "../buckets/device_stream.h"
#include "reducer.h"

namespace ddpx {

// Ends what an earlier backward has left behind. UserError if that backward did not end, or if its
// step awaits finalize_backward().
void Reducer::settle(const char* call) {
  check_not_pending(call);
  recover_if_failed();
  if (context_.progress.phase == Phase::kCollecting && scope_.empty() &&
      !running_task::in_backward()) {
    const auto missing = step_->missing();
    const auto error =
        errors::backward_incomplete(context_.where(), context_.params.names_of(missing), missing);
    fail();
    throw error;
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
    forward_.end_forward();  // the script knows of the error
  }
  backward_sync_.end(sync_enabled_);
  if (context_.progress.phase == Phase::kFinalized) {
    context_.go_to(Phase::kIdle);
  }
  if (context_.progress.phase == Phase::kCollecting) {
    abandon_step();
  }
  context_.weights.break_off();
  if (sync_enabled_) {
    context_.guard.publish_fault(cause);
  }
}

void Reducer::abandon_step() noexcept {
  context_.go_to(Phase::kFinalizing);
  // If the group has failed, peers finish no step either.
  const bool matched = !context_.guard.failed() && step_->match_peers();
  auto unused_streaks = context_.history.use.unused_streaks;
  // On a device this may be an engine thread, with other streams, and the script may change
  // gradients meanwhile. So the next call of the script recovers. In a capture, buckets stay.
  fail(/*recovers=*/context_.params.device().is_cpu() || context_.progress.captured);
  if (matched) {
    context_.history.use.unused_streaks = std::move(unused_streaks);
  }
}

// To be called in a catch block at the end of a backward or of a step. Tells peers of the error,
// because they may wait for this rank.
void Reducer::fail_with(const std::exception& error) {
  if (context_.progress.phase != Phase::kIdle) {
    fail();
  }
  context_.guard.publish_fault(error.what());
}

void Reducer::fail(bool recovers) noexcept {
  try {
    break_off();
    if (recovers) {
      recover();
    }
  } catch (...) {
    // Out of memory, for example. The next step calls recover() again and raises its error.
  }
}

// Ends the step. Uses no gradients, except in distributed autograd.
void Reducer::break_off() {
  context_.go_to(Phase::kFailed);
  step_.reset();
  dist_grads_.end(context_.params.leaves(), /*averaged=*/false);
  if (context_.use_is_exchanged()) {
    context_.history.use.forget(context_.params.device());
  }
  forward_.end_forward();
  context_.weights.break_off();
  context_.script_grads.early_updates.clear();
  context_.observer.clock().skip_step();
  context_.observer.peers().break_off();
}

void Reducer::recover_if_failed() {
  if (context_.progress.phase == Phase::kFailed) {
    recover();
  }
}

// No forward has come since the last backward, which has raised.
void Reducer::recover_in_backward() {
  if (context_.progress.phase == Phase::kFailed) {
    recover();
    context_.buckets.wait_for_streams();  // later launches wait for the current stream
    if (!context_.is_captured()) {
      // Gradients may have moved, or are cast. Autograd adds to them on these streams.
      for (const auto& hook : context_.params.hooks()) {
        if (const auto stream = hook.stream()) {
          wait_for_stream(*stream, *current_stream(stream->device()));
        }
      }
    }
  }
}

// From phase kFailed. Puts gradients and buckets in order for the next step.
void Reducer::recover() {
  auto& context = context_;
  const bool captured = context.is_captured();
  if (captured) {
    // Memory that is allocated now might belong to the graph. The work of a step whose capture has
    // failed never runs, and the work of earlier steps has ended before the capture.
    context.buckets.drop_captured();
  } else {
    // Autograd does not wait for the streams of gradients after an abort. The casts, and with views
    // the copies into new buckets, read the gradients.
    context.buckets.wait_for_streams();
  }
  context.params.links().pull_all();
  if (!captured && !context.params.device().is_cpu()) {
    context.buckets.clear_in_flight(context.params.tensors());
  }
  if (context.options.precision.compute) {
    for (std::size_t i = 0; i < context.params.size(); ++i) {
      context.cast_grad_to_local(i);
    }
  }
  // Peers may never launch what is in flight, so nothing is waited for: the backend keeps the old
  // buffers, which its work objects own.
  context.params.links().push_all();
  if (!captured) {
    context.replace_buckets(context.buckets.plan());
  }
  context_.go_to(Phase::kIdle);
}

void Reducer::reset() {
  const auto lock = lock_after_abort();
  check_outside_backward("reset()");
  backward_sync_ = {};
  forward_.end_forward();
  context_.script_grads.taken.clear();
  forget_weights();
  if (context_.progress.phase == Phase::kReady) {
    const ExclusiveMutex::Occupation occupation(context_.mutex);
    abandon_step();
  }
  if (context_.progress.phase == Phase::kCollecting) {
    break_off();
  }
  recover_if_failed();
}

}  // namespace ddpx
