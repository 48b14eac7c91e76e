// Gradients that the script may use in a wrong way.
#pragma once

#include "early_updates.h"
#include "grad_versions.h"
#include "taken_grads.h"

namespace ddpx {

// The members compare tensors with an earlier state, to see what the script changed.
// The reducer owns this object, under its mutex.
struct ScriptGrads {
  GradVersions kept;  // averages other than means, which must be cleared
  TakenGrads taken;   // local gradients, which must not be applied
  EarlyUpdates early_updates;
};

}  // namespace ddpx
