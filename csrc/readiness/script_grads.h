// Gradients that the script has, and may use in a wrong way.
#pragma once

#include "grad_versions.h"
#include "taken_grads.h"

namespace ddpx {

// Both members compare tensors with their state at the last step, to see what the script changed.
// The reducer owns this object, under its mutex.
struct ScriptGrads {
  GradVersions kept;  // averages other than means, which must be cleared
  TakenGrads taken;   // local gradients, which must not be applied
};

}  // namespace ddpx
