// The methods of StepRunner for a step that broke off.
#include <exception>
#include <utility>

#include "../autograd/running_task.h"
#include "../buckets/device_stream.h"
#include "step_runner.h"

namespace ddpx {

void StepRunner::drop_incomplete() {
  const auto missing = step_->missing();
  const auto error =
      errors::backward_incomplete(context_.where(), context_.params.names_of(missing), missing);
  fail();
  throw error;
}

void StepRunner::abandon() noexcept {
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

void StepRunner::fail_with(const std::exception& error) {
  if (context_.progress.phase != Phase::kIdle) {
    fail();
  }
  context_.guard.publish_fault(error.what());
}

void StepRunner::fail(bool recovers) noexcept {
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
void StepRunner::break_off() {
  context_.go_to(Phase::kFailed);
  step_.reset();
  dist_grads_.end(context_.params.leaves(), /*averaged=*/false);
  if (context_.use_is_exchanged()) {
    context_.history.use.forget(context_.params.device());
  }
  context_.history.forward.end_forward();
  context_.weights.break_off();
  context_.script_grads.early_updates.clear();
  context_.observer.clock().skip_step();
  context_.observer.peers().break_off();
}

void StepRunner::recover_if_failed() {
  if (context_.progress.phase == Phase::kFailed) {
    recover();
  }
}

void StepRunner::recover_in_backward() {
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
void StepRunner::recover() {
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

void StepRunner::reset() {
  if (context_.progress.phase == Phase::kReady) {
    const ExclusiveMutex::Occupation occupation(context_.mutex);
    abandon();
  }
  if (context_.progress.phase == Phase::kCollecting) {
    break_off();
  }
  recover_if_failed();
}

}  // namespace ddpx
