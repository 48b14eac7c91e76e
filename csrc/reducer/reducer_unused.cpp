// The methods of Reducer for params that a backward does not reach.
#include "../autograd/running_task.h"
#include "reducer.h"

namespace ddpx {
namespace {

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
