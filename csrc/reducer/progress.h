// How far a reducer is in its steps.
#pragma once

#include <cstdint>

#include "phase.h"

namespace ddpx {

// The context owns this object, under its mutex. ReducerContext::go_to() changes the phase.
struct Progress {
  Phase phase = Phase::kIdle;
  bool captured = false;  // the last forward, or the running step, is captured into a graph
  int64_t num_steps = 0;  // synchronized steps that ended, on this rank or for its peers
};

}  // namespace ddpx
