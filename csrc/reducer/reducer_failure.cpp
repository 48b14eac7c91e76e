// The methods of Reducer for a step that broke off.
#include <utility>

#include "../autograd/running_task.h"
#include "reducer.h"

namespace ddpx {

// Ends what an earlier backward has left behind. UserError if that backward did not end, or if its
// step awaits finalize_backward().
void Reducer::settle(const char* call) {
  check_not_pending(call);
  if (context_.progress.phase == Phase::kFailed) {
    recover();
  }
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
  backward_sync_.end(sync_enabled_);
  if (context_.progress.phase == Phase::kFinalized) {
    context_.go_to(Phase::kIdle);
  }
  if (context_.progress.phase == Phase::kCollecting) {
    abandon_step();
  }
  context_.weights.break_off();
  if (sync_enabled_) {
    context_.guard.note_fault(cause);
  }
}

void Reducer::abandon_step() noexcept {
  context_.go_to(Phase::kFinalizing);
  // If the group has failed, peers finish no step either.
  const bool matched = !context_.guard.failed() && step_->match_peers();
  auto unused_streaks = context_.history.use.unused_streaks;
  fail();
  if (matched) {
    context_.history.use.unused_streaks = std::move(unused_streaks);
  }
}

void Reducer::fail() noexcept {
  try {
    context_.go_to(Phase::kFailed);
    recover(context_.progress.captured);
  } catch (...) {
    // Out of memory, for example. The next step calls recover() again and raises its error.
  }
}

void Reducer::recover(bool captured) {
  auto& context = context_;
  step_.reset();
  dist_grads_.end(context.params.leaves(), /*averaged=*/false);
  if (captured) {
    // Captured work never runs. Memory that is allocated now might belong to the graph.
    context.buckets.drop_captured();
  } else {
    // Autograd does not wait for the streams of gradients after an abort. The casts, and with views
    // the copies into new buckets, read the gradients.
    context.buckets.wait_for_streams();
  }
  context.params.links().pull_all();
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
  if (context.use_is_exchanged()) {
    context.history.use.forget(context.params.device());
  }
  forward_.give_up();
  context_.go_to(Phase::kIdle);
  context.observer.clock().skip_step();
  context.observer.peers().break_off();
}

void Reducer::reset() {
  const auto lock = lock_after_abort();
  check_outside_backward("reset()");
  backward_sync_ = {};
  forward_.give_up();
  context_.script_grads.taken.clear();
  context_.weights.forget();
  if (context_.progress.phase == Phase::kReady) {
    const ExclusiveMutex::Occupation occupation(context_.mutex);
    abandon_step();
  }
  if (context_.progress.phase == Phase::kCollecting) {
    context_.go_to(Phase::kFailed);
  }
  if (context_.progress.phase == Phase::kFailed) {
    recover();
  }
}

}  // namespace ddpx
