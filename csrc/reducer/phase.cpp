#include "phase.h"

#include <string>

#include "../errors.h"

namespace ddpx {

const char* to_string(Phase phase) {
  switch (phase) {
    case Phase::kIdle:
      return "outside backward";
    case Phase::kRebuilding:
      return "rebuilding buckets";
    case Phase::kCollecting:
      return "backward";
    case Phase::kFinalizing:
      return "end of backward";
    case Phase::kFailed:
      return "recovery of a failed step";
    case Phase::kReady:
      return "end of backward, before finalize_backward()";
    case Phase::kFinalized:
      return "backward, after finalize_backward()";
  }
  return "unknown";
}

namespace {

bool allowed(Phase from, Phase to) {
  switch (from) {
    case Phase::kIdle:
      return to == Phase::kCollecting || to == Phase::kRebuilding || to == Phase::kFinalized;
    case Phase::kRebuilding:
      return to == Phase::kIdle || to == Phase::kFailed;
    case Phase::kCollecting:
      return to == Phase::kFinalizing || to == Phase::kFailed || to == Phase::kReady;
    case Phase::kFinalizing:
      return to == Phase::kIdle || to == Phase::kFailed;
    case Phase::kFailed:
    case Phase::kFinalized:
      return to == Phase::kIdle;
    case Phase::kReady:
      return to == Phase::kFinalizing;
  }
  return false;
}

}  // namespace

Phase transition(Phase from, Phase to) {
  if (!allowed(from, to)) {
    throw InternalError(
        std::string("illegal phase transition from '") + to_string(from) + "' to '" +
        to_string(to) + "'");
  }
  return to;
}

}  // namespace ddpx
