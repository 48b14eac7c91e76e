// Error texts about the steps of a reducer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../errors.h"
#include "step_error_texts.h"

namespace ddpx::errors {

// Default mode: these params got no gradient in the backward that just ended.
UserError params_without_gradient(
    const Where& where,
    const std::vector<std::string>& names,
    const std::vector<std::size_t>& param_indices);

// static_graph: arrivals differ from those of the first synchronized backward.
UserError static_graph_changed(
    const Where& where,
    const std::vector<std::string>& names,
    const std::vector<std::size_t>& param_indices);

// A gradient arrived again after it was final.
UserError param_arrived_again(
    const Where& where,
    const std::string& name,
    std::size_t param_index,
    bool static_graph,
    bool as_view);

// A gradient was changed in place between its arrival and the copy into its bucket.
UserError grad_changed(const Where& where, const std::string& name);

// find_unused_parameters: a gradient arrived, but its param was not in the graph of the backward.
UserError param_unforeseen(const Where& where, const std::string& name);

// A step is captured into a graph of the device, but:
// - `option` reads results on the host;
UserError host_read_under_capture(const Where& where, const std::string& option);
// - the gradient of this param is sparse;
UserError sparse_under_capture(const Where& where, const std::string& name);
// - ranks exchange in each forward which ranks have inputs;
UserError capture_in_join(const Where& where);
// - a recording asks the device for times, and torch does not tell the reducer of the capture;
UserError capture_while_recording(const Where& where);
// - the buckets are about to be rebuilt.
UserError capture_too_early(const Where& where);

// Gradients contain NaN or infinity. `findings`: the rank and the first such param of each rank.
UserError gradients_not_finite(
    const Where& where, const std::vector<std::pair<int, std::string>>& findings);
std::string finite_check();

// The gradient does not fit its slot in the bucket.
UserError gradient_mismatch(
    const Where& where,
    const std::string& name,
    const std::string& gradient,
    const std::string& expected);

// A collective failed. `what` says which, e.g. bucket_all_reduce(...).
UserError communication_failed(
    const Where& where, const std::string& what, const std::string& cause);
std::string used_map_exchange();
std::string order_broadcast();
std::string bucket_all_reduce(std::size_t bucket_index, const std::vector<std::string>& names);

// Averages by weight: no forward, or not this forward, has a weight.
UserError weight_missing(const Where& where, const std::string& module_name, bool in_backward);
// The sum of the weights of all ranks is not positive. `own`: the weight of this rank.
UserError no_weights(const Where& where, double own, double sum);
// The sum of weights has the weight of a forward without a backward.
UserError weights_lost(const Where& where);
UserError forward_left_out(const Where& where, const std::string& module_name);
// A weight of a captured step is a number.
UserError number_under_capture(const Where& where);
std::string weight_sum();

// Sums over ranks: gradients of the last averaged backward were not cleared.
UserError averages_kept(const Where& where, const std::vector<std::string>& names);

// autograd.grad() returned local gradients of params, which changed afterwards.
UserError local_grads_applied(const Where& where, const std::vector<std::string>& names);

// autograd.grad() takes gradients away that prepare_for_backward() has promised to average.
UserError grads_taken_away(const Where& where, const std::vector<std::string>& names);

// In a join() context, the backward does not do what its forward announced.
UserError joined_step_is_local(const Where& where);
UserError joined_step_averages(const Where& where);
UserError prepared_in_join(const Where& where);

// Params changed their dtype, device or shape after wrapping.
UserError params_changed(const Where& where, const std::vector<std::string>& names);
// Params did not require a gradient at wrapping, and require one now.
UserError params_unfrozen(const Where& where, const std::vector<std::string>& names);

// A second communication hook; a static graph that is declared too late.
UserError second_comm_hook(const Where& where);
UserError static_graph_too_late(const Where& where);

// A call that is only allowed between steps.
UserError inside_backward(const Where& where, const std::string& call);

// remove_hooks() was called while autograd may be walking the hooks.
UserError hooks_in_use(const Where& where);

// yield_to() was called while a backward runs.
UserError params_in_use(const Where& where);

// A backward reached params whose reducer has yielded to a reducer that no longer exists.
UserError owner_is_gone(const Where& where);

// A backward reached an output of a reducer after its params went to a reducer of other params.
UserError params_averaged_elsewhere(const Where& where, const std::vector<std::string>& names);

// Invalid arguments of callers that bypass the Python wrapper, which checks its arguments.
UserError no_such_param(std::size_t param_index, std::size_t num_params);
UserError not_positive(const std::string& what, int64_t value);

// Manual finalization: finalize_backward() was called where no step can be ended.
UserError finalization_not_manual(const Where& where);
UserError nothing_to_finalize(const Where& where);
UserError finalized_twice(const Where& where);
// `names`: the params whose gradients are not final. `at_end`: this step launches its buckets at
// the end of backward.
UserError buckets_not_ready(const Where& where, const std::vector<std::string>& names, bool at_end);

// `call` must not come before finalize_backward() has ended the step.
UserError finalization_pending(const Where& where, const std::string& call);

// The mode was changed between a forward and the end of its step.
UserError finalization_in_use(const Where& where);

// A gradient arrived in the same backward after finalize_backward().
UserError grad_after_finalization(const Where& where, const std::string& name);

// The last backward ended without gradients that it had to bring.
UserError backward_incomplete(
    const Where& where,
    const std::vector<std::string>& names,
    const std::vector<std::size_t>& param_indices);

}  // namespace ddpx::errors
