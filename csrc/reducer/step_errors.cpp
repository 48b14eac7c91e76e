#include "step_errors.h"

namespace ddpx::errors {
namespace {

// The words of DDP's error: scripts and trainers look for them.
std::string unfinished_in_ddps_words(
    const Where& where, const std::vector<std::size_t>& param_indices) {
  return " In DDP's words: Expected to have finished reduction in the prior iteration before "
         "starting a new one. This error indicates that your module has parameters that were not "
         "used in producing loss. " +
         indices_in_ddps_words(where, param_indices);
}

}  // namespace

UserError at(const Where& where, const std::string& text) {
  return UserError(
      "[ddpx rank " + std::to_string(where.rank) + ", step " + std::to_string(where.step) +
      ", phase " + to_string(where.phase) + "] " + text);
}

std::string indices_in_ddps_words(
    const Where& where, const std::vector<std::size_t>& param_indices) {
  auto text =
      "Parameter indices which did not receive grad for rank " + std::to_string(where.rank) + ":";
  for (const auto param_index : param_indices) {
    text += " " + std::to_string(param_index);
  }
  return text;
}

UserError params_without_gradient(
    const Where& where,
    const std::vector<std::string>& names,
    const std::vector<std::size_t>& param_indices) {
  const auto count = names.size();
  return at(
      where,
      count_params(count) + " got no gradient in this backward: " + join_names(names) +
          ". This rank contributed zeros " +
          by_number(count, "for this parameter", "for these parameters") +
          ". All other gradients were averaged. If a step may leave parameters unused, pass "
          "find_unused_parameters=True. If the same parameters are unused in every step, "
          "static_graph=True is faster. Otherwise use every output of forward in the loss, or "
          "freeze " +
          by_number(count, "this parameter", "these parameters") + " before wrapping." +
          unfinished_in_ddps_words(where, param_indices));
}

std::string finite_check() {
  return "the all-reduce that checks whether all gradients are finite";
}

std::string used_map_exchange() {
  return "the all-reduce of the map of used parameters";
}

UserError grads_taken_away(const Where& where, const std::vector<std::string>& names) {
  const auto count = names.size();
  return at(
      where,
      "prepare_for_backward() announced a backward whose gradients are averaged, but "
      "torch.autograd.grad() computes " +
          by_number(count, "the gradient of ", "the gradients of ") + count_params(count) + " (" +
          join_names(names) + "). " +
          by_number(
              count, "This gradient would stay local. ", "These gradients would stay local. ") +
          "Zero-bubble pipeline schedules call torch.autograd.grad() in this way "
          "(ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV). Use "
          "ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B instead.");
}

UserError inside_backward(const Where& where, const std::string& call) {
  return at(where, call + " was called while a backward runs. Call " + call + " between steps.");
}

UserError deleted_before_backward(const Where& where, const std::string& module_name) {
  return at(
      where,
      "the wrapper of " + module_name +
          " was deleted before this backward had ended, so gradients would stay local. Keep "
          "a reference to the wrapper until backward has ended. For local gradients on purpose, "
          "run forward in model.no_sync().");
}

UserError no_such_param(std::size_t param_index, std::size_t num_params) {
  return UserError(
      "parameter index " + std::to_string(param_index) + " is out of range: the reducer has " +
      count_params(num_params) + ", and indices start at 0.");
}

UserError not_positive(const std::string& what, int64_t value) {
  return UserError(what + " must be 1 or more, but is " + std::to_string(value) + ".");
}

UserError backward_incomplete(
    const Where& where,
    const std::vector<std::string>& names,
    const std::vector<std::size_t>& param_indices) {
  return at(
      where,
      "the last backward ended without " +
          by_number(names.size(), "a gradient for ", "gradients for ") +
          count_params(names.size()) + ": " + join_names(names) +
          ". The other gradients of that backward were not averaged. This can happen when the "
          "wrapped module is called directly under reentrant checkpoints. Call the wrapper "
          "instead, or use checkpoint(..., use_reentrant=False)." +
          unfinished_in_ddps_words(where, param_indices));
}

UserError weight_missing(const Where& where, const std::string& module_name, bool in_backward) {
  return at(
      where,
      "the wrapper of " + module_name + " averages by weight (average=\"weights\"), but " +
          (in_backward ? "no forward since the last averaged backward has a weight. "
                       : "this forward has no weight. ") +
          kWeightRemedy);
}

std::string weight_sum() {
  return "the all-reduce of the sum of weights";
}

}  // namespace ddpx::errors
