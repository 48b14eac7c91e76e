// What any thread may read of a reducer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "context.h"

namespace ddpx {

// Reducer::state() returns it. It must not outlive the reducer. Each method takes the mutex of the
// reducer.
class ReducerState {
 public:
  explicit ReducerState(const ReducerContext& context) : context_(context) {}

  Phase phase() const {
    return look([](const auto& context) { return context.progress.phase; });
  }
  BucketPlan plan() const {
    return look([](const auto& context) { return context.buckets.plan(); });
  }
  // The order of arrival by which buckets were rebuilt; empty before the rebuild.
  std::vector<std::size_t> arrival_order() const {
    return look([](const auto& context) { return context.history.order.agreed(); });
  }
  // Whether every step so far used the same params equally often.
  bool graph_was_static() const {
    return look([](const auto& context) { return context.history.arrivals.always_the_same(); });
  }
  // Whether the next finalize_backward() must come after backward has returned: buckets are
  // launched at the end of backward, or are about to be rebuilt. False without manual finalization.
  bool should_finalize_after_backward() const {
    return look([](const auto& context) {
      const bool at_end = context.history.arrivals.learning() || context.history.order.wanted() ||
                          context.history.order.due() || context.options.precision.compute;
      return context.settings.manual_finalization && at_end;
    });
  }

  // Synchronized steps that ended, on this rank or for its peers.
  int64_t num_steps() const {
    return look([](const auto& context) { return context.progress.num_steps; });
  }
  // See AwaitedSteps::number().
  std::optional<int64_t> num_steps_waited() const {
    return look([](const auto& context) { return context.progress.awaited.number(); });
  }
  // The steps among them whose averages are known to be right. On a device, an abort may have ended
  // the all-reduces of later steps.
  int64_t num_steps_averaged() const {
    return look([](const auto& context) {
      return context.observer.device().num_reduced().value_or(context.progress.num_steps);
    });
  }

  StepReport report() const {
    return look([](const auto& context) { return context.observer.clock().report(); });
  }
  bool recorded() const {
    return look([](const auto& context) { return context.observer.recorded(); });
  }
  // Empty if no step and no setting has failed.
  std::string last_error() const {
    return look([](const auto& context) { return context.progress.last_error; });
  }

 private:
  template <typename Function>
  std::invoke_result_t<Function, const ReducerContext&> look(const Function& function) const {
    const auto lock = context_.mutex.lock();
    return function(context_);
  }

  const ReducerContext& context_;
};

}  // namespace ddpx
