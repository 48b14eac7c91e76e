// The methods of Reducer for uneven inputs: ranks without inputs make the steps of the others.
#include <exception>
#include <optional>

#include "empty_step.h"
#include "reducer.h"
#include "step_checks.h"

namespace ddpx {

void Reducer::announce_joined_step(bool averages) {
  const auto lock = lock_after_abort();
  if (averages || joined_step_ != JoinedStep::kAverages) {
    joined_step_ = averages ? JoinedStep::kAverages : JoinedStep::kLocal;
  }
}

// Ranks without inputs make the step that the forward of this rank has announced.
void Reducer::check_joined_step() {
  if (joined_step_ == JoinedStep::kLocal) {
    throw context_.error(
        "in a join() context, forward ran inside no_sync() and announced to the other ranks that "
        "this step leaves gradients local, but this backward averages gradients. Put the backward "
        "inside no_sync() as well to keep gradients local, or the forward outside to average "
        "them.");
  }
  auto announced = JoinedStep::kAverages;  // leave_join() may come in between
  joined_step_.compare_exchange_strong(announced, JoinedStep::kUnannounced);
}

void Reducer::shadow_step() {
  const auto lock = lock_after_abort();
  const ExclusiveMutex::Occupation occupation(context_.mutex);
  recover_if_failed();
  check_peers(context_);
  check_idle("join()");
  context_.go_to(Phase::kCollecting);
  context_.history.had_forward = true;  // on the ranks with inputs
  context_.observer.peers().begin_step(context_.step_number());
  context_.go_to(Phase::kFinalizing);
  std::optional<UserError> error;
  try {
    error = EmptyStep(context_).run();
  } catch (const std::exception& fault) {
    fail_with(fault);
    throw;
  }
  end_step();
  context_.skip_step();
  emit(StepEvent::kIdle);
  if (error) {
    context_.guard.publish_fault(error->what());
    context_.raise(*error);
  }
}

}  // namespace ddpx
