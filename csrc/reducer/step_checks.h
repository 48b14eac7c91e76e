// What must hold when a forward or a step begins.
#pragma once

#include <memory>

#include "context.h"

namespace ddpx {

// With the mutex held, which a wait releases. Waits for the end of an abort, or for the lease of
// the host. Throws if ranks are lost.
void check_peers(const ReducerContext& context);

// A param that was cast has lost its hook: `listener` gets a new one. UserError if a param changed
// dtype, device or shape, or if a param that was frozen requires a gradient: gradients would stay
// local silently.
void check_params(ReducerContext& context, const std::weak_ptr<GradListener>& listener);

// UserError if the step averages by weight, and has no weight.
void check_weights(ReducerContext& context);

}  // namespace ddpx
