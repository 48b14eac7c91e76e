#include "activity.h"

#include <ctime>

namespace ddpx::health {

const char* to_string(Doing doing) {
  switch (doing) {
    case Doing::kConstructing:
    case Doing::kConstruction:
      return "construction";
    case Doing::kOutside:
      return "between steps";
    case Doing::kRebuilding:
      return "forward (agreeing on the order of buckets)";
    case Doing::kBuffers:
      return "forward (waiting for rank 0's buffers)";
    case Doing::kForward:
      return "forward";
    case Doing::kBackward:
      return "backward";
    case Doing::kHook:
    case Doing::kBrokenHook:
      return "communication hook";
    case Doing::kSettling:
      return "backward (waiting for the last step's agreement on used parameters)";
    case Doing::kWaiting:
      return "waiting for buckets";
    case Doing::kAgreeing:
      return "agreeing at the end of the step";
  }
  return "unknown";
}

bool waits_for_peers(Doing doing) {
  switch (doing) {
    case Doing::kConstruction:
    case Doing::kRebuilding:
    case Doing::kBuffers:
    case Doing::kSettling:
    case Doing::kWaiting:
    case Doing::kAgreeing:
      return true;
    case Doing::kConstructing:
    case Doing::kOutside:
    case Doing::kForward:
    case Doing::kBackward:
    case Doing::kHook:
    case Doing::kBrokenHook:
      return false;
  }
  return false;
}

bool may_wait(Doing doing) {
  return waits_for_peers(doing) || doing == Doing::kHook;
}

uint8_t stage_of(Doing doing) {
  switch (doing) {
    case Doing::kConstructing:
    case Doing::kConstruction:
    case Doing::kOutside:
      return 0;
    case Doing::kRebuilding:
      return 1;
    case Doing::kBuffers:
      return 2;
    case Doing::kForward:
      return 3;
    case Doing::kBackward:
    case Doing::kHook:
    case Doing::kBrokenHook:
    case Doing::kSettling:
    case Doing::kWaiting:
      return 4;
    case Doing::kAgreeing:
      return 5;
  }
  return 0;
}

int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace ddpx::health
