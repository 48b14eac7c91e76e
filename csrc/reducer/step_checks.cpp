#include "step_checks.h"

namespace ddpx {

void check_peers(const ReducerContext& context) {
  const auto& guard = context.guard;
  if (!guard.failed() && !guard.has_lease()) {
    guard.check();
    return;
  }
  // Waits for the end of an abort, or for the lease.
  const ExclusiveMutex::Occupation occupation(context.mutex);
  const ExclusiveMutex::Unlocked unlocked(context.mutex);
  guard.check();
  guard.await_lease();
}

void check_params(ReducerContext& context, const std::weak_ptr<GradListener>& listener) {
  const auto changed = context.params.restore_hooks(listener);
  if (!changed.empty()) {
    context.raise(
        errors::count_params(changed.size()) + " changed dtype, device or shape after wrapping: " +
        join_names(context.params.names_of(changed)) +
        ". Cast and move the module before wrapping, or wrap the module again: model = "
        "ReducerDDP(model.module, ...).");
  }
  const auto unfrozen = context.params.unfrozen();
  if (!unfrozen.empty()) {
    const auto count = unfrozen.size();
    context.raise(
        errors::count_params(count) +
        " did not require a gradient when the module was wrapped, and now " +
        errors::by_number(count, "does: ", "do: ") + join_names(unfrozen) +
        errors::by_number(count, ". Its gradient would", ". Their gradients would") +
        " not be averaged. Wrap the module again after unfreezing: model = "
        "ReducerDDP(model.module, ...).");
  }
}

void check_weights(ReducerContext& context) {
  if (context.options.average != Average::kWeights) {
    return;
  }
  if (context.weights.has_lost()) {
    context.raise(
        "the weights of earlier forwards are forgotten, because a backward raised an error or the "
        "script called ddpx.reset(model), but gradients of these forwards may remain. Clear the "
        "gradients (optimizer.zero_grad(), or a new context of torch.distributed.autograd), and "
        "then call ddpx.reset(model).");
  }
  if (!context.weights.counted()) {
    context.weights.count();  // set for a forward that bypassed the wrapper
  }
  if (!context.weights.counted()) {
    context.raise(
        errors::weight_missing(context.where(), context.options.module_name, /*in_backward=*/true));
  }
}

}  // namespace ddpx
