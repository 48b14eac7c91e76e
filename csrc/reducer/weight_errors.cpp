// Error texts about averages by weight.
#include <sstream>

#include "step_errors.h"

namespace ddpx::errors {
namespace {

const char* const kRemedy =
    "Call ddpx.set_weight(model, n) before each forward. n is the number of items, such as tokens, "
    "that the loss sums over: 0 or more.";

}  // namespace

UserError weight_missing(const Where& where, const std::string& module_name, bool in_backward) {
  return UserError(
      opening(where) + "the wrapper of " + module_name +
      " averages by weight (average=\"weights\"), but " +
      (in_backward ? "no forward since the last averaged backward has a weight. "
                   : "this forward has no weight. ") +
      kRemedy);
}

UserError no_weights(const Where& where, double own, double sum) {
  std::ostringstream out;
  out << opening(where);
  if (sum == 0) {
    out << "the weights of all ranks and micro-steps of this step sum to 0, so the average does "
           "not exist. At least one rank needs a loss over 1 or more items. Skip the step on all "
           "ranks otherwise.";
  } else if (sum < 0) {
    out << "the weights of all ranks and micro-steps of this step sum to " << sum << ".";
  } else if (own != own) {
    out << "a weight of this rank is negative, infinite or NaN.";
  } else {
    out << "a weight of another rank is negative, infinite or NaN. The error of that rank says so.";
  }
  out << " All gradients of this step are NaN. " << kRemedy;
  return UserError(out.str());
}

UserError forward_left_out(const Where& where, const std::string& module_name) {
  return UserError(
      opening(where) + "the gradients of the wrapper of " + module_name +
      " were divided by the weights of all forwards since the last averaged backward, but no "
      "backward has reached an output of one of these forwards. All gradients of this step are too "
      "small. Run a forward that needs no backward in torch.no_grad(), or set its weight to 0. "
      "Average the outputs of several forwards in one backward, or run all but the last backward "
      "in model.no_sync(). To skip a backward, call ddpx.reset(model) and clear the gradients.");
}

UserError weights_lost(const Where& where) {
  return UserError(
      opening(where) +
      "a backward in no_sync() has raised an error, and the weights of earlier forwards are "
      "forgotten, but gradients of these forwards may remain. Clear the gradients "
      "(optimizer.zero_grad()) and call ddpx.reset(model) after the error.");
}

UserError averages_kept(const Where& where, const std::vector<std::string>& names) {
  const auto count = names.size();
  return UserError(
      opening(where) + "a backward begins, and " + count_params(count) + " still " +
      by_number(count, "has", "have") +
      " the gradient of the last averaged backward: " + join_names(names) +
      ". The sum over ranks would contain this gradient once for each rank. Call "
      "optimizer.zero_grad() after each averaged backward. To accumulate gradients, run all but "
      "the last backward in model.no_sync().");
}

UserError number_under_capture(const Where& where) {
  return UserError(
      opening(where) +
      "a step is captured into a CUDA graph, but a weight of this step is a number. The graph "
      "would repeat the number. Pass a tensor on the device: ddpx.set_weight(model, tensor).");
}

std::string weight_sum() {
  return "the all-reduce of the sum of weights";
}

}  // namespace ddpx::errors
