// The methods of StepRunner for manual finalization: finalize() ends a step.
//
// The end of backward makes all calls that peers wait for. So ranks may call finalize() at
// different places between collective calls of the script.
#include <exception>

#include "step_runner.h"

namespace ddpx {
namespace {

UserError buckets_not_ready(
    const errors::Where& where, const std::vector<std::string>& names, bool at_end) {
  const std::string remedy =
      at_end ? "This step launches its buckets at the end of backward: "
               "should_finalize_after_backward is True. Call finalize_backward() after backward "
               "has returned."
             : "Nothing is lost. Call finalize_backward() again, in a later hook or after backward "
               "has returned.";
  return errors::at(
      where,
      "finalize_backward() called before all DDP buckets were ready. " +
          errors::count_params(names.size()) + errors::by_number(names.size(), " has", " have") +
          " no final gradient yet" + (names.empty() ? "" : ": " + join_names(names)) + ". " +
          remedy);
}

}  // namespace

// The first sentences of these errors have torch's words: scripts and tests look for them.
void StepRunner::check_can_finalize(bool begins) const {
  const auto where = context_.where();
  if (!context_.settings.manual_finalization) {
    throw errors::at(
        where,
        "finalize_backward() called but manual backward finalization is not required. The end of "
        "backward finalizes each step. Set require_manual_backward_finalization to true first, "
        "before forward, or leave the call out.");
  }
  const bool at_end = context_.history.arrivals.learning();
  if (begins) {
    throw buckets_not_ready(where, context_.params.names(), at_end);
  }
  switch (context_.progress.phase) {
    case Phase::kReady:
      return;
    case Phase::kCollecting:
      if (!step_->ready()) {
        throw buckets_not_ready(where, context_.params.names_of(step_->unfinished()), at_end);
      }
      return;
    case Phase::kFinalizing:
    case Phase::kFinalized:
      throw errors::at(
          where,
          "finalize_backward() called but no gradient reduction requires finalization. "
          "finalize_backward() was already called for this backward pass. Call finalize_backward() "
          "once for each synchronized backward.");
    case Phase::kIdle:
    case Phase::kRebuilding:
    case Phase::kFailed:
      throw errors::at(
          where,
          "finalize_backward() called but no gradient reduction requires finalization. No "
          "synchronized backward has run since the last finalization: a backward in no_sync() "
          "leaves gradients local, and a backward that raised an error ends its step. Call "
          "finalize_backward() once for each synchronized backward.");
  }
}

void StepRunner::check_not_pending(const char* call) const {
  if (context_.progress.phase == Phase::kReady) {
    throw context_.error(
        "Expected to have finalized the prior backward pass before starting a new one. The "
        "gradients of that backward pass are not averaged yet, and " +
        std::string(call) +
        " would change them. Call finalize_backward() after backward() when "
        "require_manual_backward_finalization is true. To drop the gradients of that backward "
        "pass, call model.reset().");
  }
}

void StepRunner::await_finalization(bool output_reached, const OutputWatch& outputs) {
  context_.emit(StepEvent::kBackwardEnd);
  try {
    step_->launch_rest();
  } catch (const std::exception& error) {
    fail_with(error);
    throw;
  }
  step_->hold_grads();
  context_.go_to(Phase::kReady);
  report_missing(output_reached, outputs);
  context_.emit(StepEvent::kReady);
}

void StepRunner::finalize(bool in_backward, bool output_reached, const OutputWatch& outputs) {
  const auto stay_in_backward = [&] {
    if (in_backward && context_.progress.phase == Phase::kIdle) {
      context_.go_to(Phase::kFinalized);
    }
  };
  if (context_.progress.phase == Phase::kReady) {
    context_.go_to(Phase::kFinalizing);
  } else {
    context_.buckets.wait_for_streams();
    end_backward(output_reached, outputs);
  }
  try {
    finish();
  } catch (...) {
    stay_in_backward();
    throw;
  }
  stay_in_backward();
}

void StepRunner::leave_backward() {
  if (context_.progress.phase == Phase::kFinalized) {
    context_.go_to(Phase::kIdle);
  }
}

void StepRunner::refuse_grad(std::size_t param_index) {
  if (context_.progress.phase == Phase::kFinalized) {
    throw context_.error(
        "parameter '" + context_.params.name(param_index) +
        "' got another gradient after finalize_backward() had averaged its gradient in the same "
        "backward. param.grad contains a local gradient of this rank. Call finalize_backward() "
        "after backward has returned, and restart from a checkpoint.");
  }
  if (context_.progress.phase == Phase::kReady) {
    if (context_.options.gradient_as_bucket_view) {
      step_->report_late(param_index);
    } else {
      step_->hold_grads();  // finalize_backward() replaces this gradient, too
    }
    check_not_pending("a backward");
  }
}

}  // namespace ddpx
