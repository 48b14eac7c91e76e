// The methods of Reducer for params that a backward does not reach.
#include <utility>

#include "../autograd/running_task.h"
#include "reducer.h"

namespace ddpx {
namespace {

UserError static_graph_changed(
    const errors::Where& where,
    const std::vector<std::string>& names,
    const std::vector<std::size_t>& param_indices) {
  // The first sentences are torch's: scripts and tests look for them.
  return errors::at(
      where,
      "Expected to have finished reduction in the prior iteration before starting a new one. This "
      "error indicates that your training graph has changed in this iteration, e.g., one parameter "
      "is used in first iteration, but then got unused in the second iteration. this is not "
      "compatible with static_graph set to True.\n" +
          errors::indices_in_ddps_words(where, param_indices) + ". " +
          errors::count_params(names.size()) +
          " got fewer gradients than in the first synchronized backward with static_graph=True: " +
          join_names(names) +
          ". Remove static_graph=True, or pass find_unused_parameters=True instead.");
}

GraphTaskId current_task_id() {
  return {running_task::id(), running_task::depth()};
}

}  // namespace

// Once per backward: the first tracked graph task counts.
void Reducer::predict_unused() {
  auto& prediction = context_.history.use.prediction;
  if (context_.options.mode == GraphMode::kFindUnused && !scope_.contains(prediction.task_id())) {
    prediction.begin(current_task_id(), running_task::unreached(context_.params.hooks()));
  }
}

void Reducer::record_arrival(std::size_t param_index, bool kept_local) {
  if (context_.options.mode != GraphMode::kFindUnused) {
    return;
  }
  auto& prediction = context_.history.use.prediction;
  if (kept_local) {
    prediction.record_local_arrival(param_index, current_task_id());
  } else {
    prediction.record_arrival(param_index, current_task_id());
  }
}

// Whether the backward on this thread is known to bring no gradient at all.
bool Reducer::reaches_nothing() const {
  return context_.options.mode == GraphMode::kFindUnused && !context_.history.arrivals.learning() &&
         backward_sync_.expects_grads() && running_task::runs_whole_graph() &&
         !context_.params.all_frozen() && context_.history.use.prediction.reaches_nothing();
}

// Delayed params may be unused, as in DDP.
Reducer::Indices Reducer::missing_at_end() const {
  if (context_.use_varies() ||
      (context_.history.arrivals.learning() && context_.options.mode != GraphMode::kDefault)) {
    return {};
  }
  auto missing = step_->missing();
  std::erase_if(missing, [this](std::size_t i) { return context_.params.metas()[i].delayed; });
  return missing;
}

// The step raises the error when it ends.
void Reducer::report_missing(bool output_reached) {
  const auto missing = missing_at_end();
  if (missing.empty()) {
    return;
  }
  const auto where = context_.where();
  const auto& params = context_.params;
  if (context_.options.mode == GraphMode::kStatic) {
    step_->report_missing(static_graph_changed(where, params.names_of(missing), missing));
    return;
  }
  // Another output of the same forward may have brought them, or may still bring them.
  const auto nodes_to_come = outputs_.nodes_to_come();
  Indices unused;
  Indices possibly_late;
  for (const auto param_index : missing) {
    if (output_reached && forward_.arrived(param_index)) {
      continue;
    }
    const bool to_come = nodes_to_come.count(params.hooks()[param_index].accumulator()) != 0;
    (to_come ? possibly_late : unused).push_back(param_index);
  }
  forward_.expect(std::move(possibly_late));
  if (!unused.empty()) {
    step_->report_missing(errors::params_without_gradient(where, params.names_of(unused), unused));
  }
}

std::vector<int32_t> Reducer::used_by_ranks() {
  const auto lock = context_.mutex.lock();
  auto& use = context_.history.use;
  // A thread that finalizes a step may wait for this one, as for the continuation of a hook's
  // future. With manual finalization, a backward may launch the map without an occupation.
  const bool may_be_launched =
      context_.progress.phase == Phase::kCollecting && context_.settings.manual_finalization;
  if (!context_.mutex.occupied_by_other() && !may_be_launched) {
    const ExclusiveMutex::Occupation occupation(context_.mutex);
    context_.communicate([&] { use.map.wait(); }, errors::used_map_exchange);
    use.last_sums = use.map.last_sums();
  }
  return context_.communicate(
      [sums = use.last_sums] { return sums.num_ranks_using(); }, errors::used_map_exchange);
}

}  // namespace ddpx
