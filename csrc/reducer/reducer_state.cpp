#include "reducer_state.h"

namespace ddpx {

bool ReducerState::should_finalize_after_backward() const {
  return look([](const ReducerContext& context) {
    const bool at_end = context.history.arrivals.learning() || context.history.order.wanted() ||
                        context.history.order.due() || context.options.precision.compute;
    return context.settings.manual_finalization && at_end;
  });
}

}  // namespace ddpx
