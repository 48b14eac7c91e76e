// Checks that refuse steps which cannot be captured into a graph of the device.
#pragma once

#include "context.h"

namespace ddpx {

// With the mutex held. UserError if the step that begins cannot be captured. Raised before a
// capture contains any work of ddpx, so that the capture stays valid. `averages`: backwards are
// synchronized.
void refuse_capture(const ReducerContext& context, bool averages);

// To be called at the start of each forward in a join() context, before ranks exchange anything,
// with the mutex held. UserError if the current stream is captured. For `captured`, see
// Reducer::prepare_forward().
void refuse_join_capture(const ReducerContext& context, bool captured);

}  // namespace ddpx
