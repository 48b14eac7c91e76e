#include "accumulated_grads.h"

#include <algorithm>
#include <utility>

#include "../autograd/running_task.h"
#include "../buckets/grad_values.h"
#include "../buckets/param_grad.h"

namespace ddpx {
namespace {

// On a device, the host waits for the answer, unless the step is captured.
bool may_be_nonzero(const at::Tensor& grad, bool captured) {
  const auto values = (grad.is_sparse() ? grad._values() : grad).resolve_conj().resolve_neg();
  return captured || !holds_values(values) || values.ne(0).any().item<bool>();
}

}  // namespace

void AccumulatedGrads::set_weight(double number) {
  context_.weights.set(number);
  mark_grads_cleared();
}

void AccumulatedGrads::set_weight(const at::Tensor& tensor) {
  context_.weights.set(tensor, context_.params.device());
  mark_grads_cleared();
}

void AccumulatedGrads::count_weight(WatchedForward forward) {
  auto& weights = context_.weights;
  if (!weights.is_set()) {
    return;
  }
  end_loss_if_cleared();
  if (weights.belongs_to_grads() && no_grads()) {
    weights.forget();
  }
  weights.count(std::move(forward));
}

// The values are read only if nothing is known to have changed them: `param.grad.data.zero_()` does
// not change the version.
std::optional<UserError> AccumulatedGrads::find_averages() {
  const auto& params = context_.params;
  auto& kept = context_.script_grads.kept;
  if (kept.empty() || running_task::is_distributed() ||
      context_.options.mode == GraphMode::kFindUnused) {
    return std::nullopt;  // with kFindUnused, a param that no rank uses keeps its gradient
  }
  std::vector<std::size_t> averages;
  for (const auto param_index : kept.pop_unchanged(params.leaves())) {
    params.links().pull(param_index);
    const auto& grad = grad_of(params[param_index]);
    if (!params.leaves()[param_index].requires_grad()) {
      continue;  // frozen since: not averaged
    }
    if (may_be_nonzero(grad, context_.progress.captured)) {
      averages.push_back(param_index);
    }
  }
  if (averages.empty()) {
    return std::nullopt;
  }
  kept.record(params.leaves(), averages);  // for another try
  const auto count = averages.size();
  return context_.error(
      "a backward begins, and " + errors::count_params(count) + " still " +
      errors::by_number(count, "has", "have") +
      " the gradient of the last averaged backward: " + join_names(params.names_of(averages)) +
      ". The sum over ranks would contain this gradient once for each rank. Call "
      "optimizer.zero_grad() after each averaged backward. To accumulate gradients, run all but "
      "the last backward in model.no_sync().");
}

// The gradients of a context of torch.distributed.autograd are not in `param.grad`.
void AccumulatedGrads::check_dist_averages() const {
  if (context_.options.average != Average::kMean &&
      context_.options.mode != GraphMode::kFindUnused && dist_grads_.are_averages()) {
    context_.raise(
        "a second averaged backward begins in one context of torch.distributed.autograd, which has "
        "averaged gradients already. The sum over ranks would contain these gradients once for "
        "each rank. Use a new context for each averaged backward. To accumulate gradients, run all "
        "but the last backward in model.no_sync().");
  }
}

void AccumulatedGrads::forget_weights() {
  auto& weights = context_.weights;
  if ((weights.has_grads() || weights.has_lost()) && grads_remain()) {
    weights.lose();
  } else {
    weights.forget();
  }
}

void AccumulatedGrads::end_loss_if_cleared() {
  if (context_.weights.has_lost() && !grads_remain()) {
    context_.weights.end_loss();
  }
}

bool AccumulatedGrads::no_grads() const {
  return context_.params.no_grads() && !dist_grads_.has_any(context_.params.leaves());
}

bool AccumulatedGrads::grads_remain() const {
  const auto& leaves = context_.params.leaves();
  if (dist_grads_.has_any(leaves)) {
    return true;
  }
  const bool captured = context_.is_captured();
  if (!captured) {
    context_.buckets.wait_for_streams();  // autograd does not wait for them after an abort
  }
  return std::any_of(leaves.begin(), leaves.end(), [captured](const at::Tensor& leaf) {
    const auto& grad = grad_of(leaf);
    return grad.defined() && may_be_nonzero(grad, captured);
  });
}

void AccumulatedGrads::mark_grads_cleared() {
  end_loss_if_cleared();
  if (context_.weights.counted() && no_grads()) {
    context_.weights.mark_grads_cleared();
  }
}

}  // namespace ddpx
