// The methods of Reducer for other averages than the mean.
#include "../buckets/grad_values.h"
#include "../buckets/param_grad.h"
#include "reducer.h"

namespace ddpx {

void Reducer::set_weight(double number) {
  const auto lock = lock_after_abort();
  context_.weights.set(number);
  mark_grads_cleared();
}

void Reducer::set_weight(const at::Tensor& tensor) {
  const auto lock = lock_after_abort();
  context_.weights.set(tensor, context_.params.device());
  mark_grads_cleared();
}

void Reducer::mark_grads_cleared() {
  if (context_.weights.counted() && context_.params.no_grads()) {
    context_.weights.mark_grads_cleared();
  }
}

// The first gradient of a backward that reaches no output of the wrapper's forward.
void Reducer::begin_bypass() {
  if (!context_.script_grads.kept.empty()) {
    check_kept_averages();
  }
  context_.weights.count_bypass();
}

// Before the first gradient of the first backward after a step. The values are read only if nothing
// is known to have changed them: `param.grad.data.zero_()` does not change the version.
void Reducer::check_kept_averages() {
  const auto& params = context_.params;
  if (context_.options.mode == GraphMode::kFindUnused) {
    return;  // a param that no rank uses keeps its gradient
  }
  Indices kept;
  for (const auto param_index : context_.script_grads.kept.pop_unchanged(params.leaves())) {
    params.links().pull(param_index);
    const auto& grad = grad_of(params[param_index]);
    if (!params.leaves()[param_index].requires_grad()) {
      continue;  // frozen since: not averaged
    }
    if (context_.progress.captured || !holds_values(grad) || grad.ne(0).any().item<bool>()) {
      kept.push_back(param_index);
    }
  }
  if (!kept.empty()) {
    context_.script_grads.kept.record(params.leaves(), kept);  // for another try
    scope_.track(weak_from_this());                            // the backward aborts
    context_.raise(
        "a backward begins, and " + errors::count_params(kept.size()) + " still " +
        errors::by_number(kept.size(), "has", "have") +
        " the gradient of the last averaged backward: " + join_names(params.names_of(kept)) +
        ". The sum over ranks would contain this gradient once for each rank. Call "
        "optimizer.zero_grad() after each averaged backward. To accumulate gradients, run all but "
        "the last backward in model.no_sync().");
  }
}

}  // namespace ddpx
