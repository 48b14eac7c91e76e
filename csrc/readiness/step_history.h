// Facts of earlier forwards and steps about the gradients to come.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <vector>

#include "arrival_order.h"
#include "arrival_tracker.h"
#include "forward_grads.h"
#include "param_use.h"

namespace ddpx {

// The reducer owns the history, under its mutex.
struct StepHistory {
  // `rebuilds`: buckets are to be rebuilt by the order of arrival.
  StepHistory(std::size_t num_params, c10::Device device, GraphMode mode, bool rebuilds)
      : arrivals(num_params, mode),
        order(num_params, rebuilds),
        use(num_params, device),
        forward(num_params) {}

  // Forgets all steps. The prediction of unused params stays.
  void start_over(c10::Device device, GraphMode mode, bool rebuilds) {
    const auto num_params = use.prediction.num_params();
    arrivals = ArrivalHistory(num_params, mode);
    order = ArrivalOrder(num_params, rebuilds);
    use.forget(device);
    use.static_use_known = false;
    forward.restart();
  }

  // These params have arrived in the step. The arrival order of the first step determines the
  // rebuilt buckets. In a static graph, the arrival order of the second step does. All ranks count
  // the same step, also ranks that take part without gradients.
  void complete_order(GraphMode mode, const std::vector<std::size_t>& arrived) {
    if (mode != GraphMode::kStatic || use.static_use_known) {
      order.complete(arrived);
    }
  }

  // Whether each step may leave params unused: with find_unused_parameters, and in default mode
  // until the first forward. A container of layers that act within another model has no forward.
  bool use_varies(GraphMode mode) const {
    return mode == GraphMode::kFindUnused || (mode == GraphMode::kDefault && !had_forward);
  }

  // Whether ranks exchange at the end of this step which params they used.
  bool use_is_exchanged(GraphMode mode) const {
    return use_varies(mode) || (mode == GraphMode::kStatic && !use.static_use_known);
  }

  ArrivalHistory arrivals;
  ArrivalOrder order;
  ParamUse use;
  ForwardGrads forward;
  bool had_forward = false;  // on this rank, or on its peers in a join() context
};

}  // namespace ddpx
