// The phases of a reducer, and the one function that moves between them.
#pragma once

namespace ddpx {

// Files of recordings contain these numbers: append new phases at the end.
enum class Phase {
  kIdle,        // between synchronized backwards
  kRebuilding,  // ranks agree on the arrival order, and buckets are allocated by it
  kCollecting,  // a synchronized backward is running: gradients arrive, buckets are launched
  kFinalizing,  // backward has ended: waiting for all-reduces and writing gradients back
  kFailed,      // the step broke off: buffers may still be in use by the backend
  kReady,       // backward has ended, all buckets are launched: finalize_backward() is awaited
  kFinalized,   // finalize_backward() was called within a backward, which still runs
};

// In words for error texts.
const char* to_string(Phase phase);

// Returns `to` if a reducer may go there from `from`; throws InternalError naming both if not.
Phase transition(Phase from, Phase to);

}  // namespace ddpx
