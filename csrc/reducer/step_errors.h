// The place of an error of a reducer, and error texts with several callers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../count.h"
#include "../errors.h"
#include "phase.h"

namespace ddpx::errors {

// The place of an error.
struct Where {
  int rank;
  int64_t step;  // number of synchronized steps that ended before
  Phase phase;
};

// The text begins with "[ddpx rank R, step S, phase P] ".
UserError at(const Where& where, const std::string& text);

inline std::string count_params(std::size_t number) {
  return count(number, "parameter");
}

// `one` or `several`, which are the singular and the plural of a part of a sentence.
inline std::string by_number(
    std::size_t count, const std::string& one, const std::string& several) {
  return count == 1 ? one : several;
}

// The end of a sentence of DDP, which lists these params.
std::string indices_in_ddps_words(
    const Where& where, const std::vector<std::size_t>& param_indices);

// Default mode: these params got no gradient in the backward that just ended.
UserError params_without_gradient(
    const Where& where,
    const std::vector<std::string>& names,
    const std::vector<std::size_t>& param_indices);

// Collective calls, as errors name them.
std::string used_map_exchange();
std::string finite_check();
std::string weight_sum();

// Averages by weight: no forward, or not this forward, has a weight.
inline constexpr const char* kWeightRemedy =
    "Call ddpx.set_weight(model, n) before each forward. n is the number of items, such as tokens, "
    "that the loss sums over: 0 or more.";
UserError weight_missing(const Where& where, const std::string& module_name, bool in_backward);

// autograd.grad() takes gradients away that prepare_for_backward() has promised to average.
UserError grads_taken_away(const Where& where, const std::vector<std::string>& names);

// A call that is only allowed between steps.
UserError inside_backward(const Where& where, const std::string& call);

UserError deleted_before_backward(const Where& where, const std::string& module_name);

// Invalid arguments of callers that bypass the Python wrapper, which checks its arguments.
UserError no_such_param(std::size_t param_index, std::size_t num_params);
UserError not_positive(const std::string& what, int64_t value);

// The last backward ended without gradients that it had to bring.
UserError backward_incomplete(
    const Where& where,
    const std::vector<std::string>& names,
    const std::vector<std::size_t>& param_indices);

}  // namespace ddpx::errors
