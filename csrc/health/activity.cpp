#include "activity.h"

#include <array>
#include <cstddef>
#include <ctime>

namespace ddpx::health {

namespace {

struct Traits {
  const char* name;
  bool waits_for_peers;
  uint8_t stage;
};

// By Doing.
constexpr std::array kTraits{
    Traits{"construction", false, 0},
    Traits{"construction", true, 0},
    Traits{"between steps", false, 0},
    Traits{"forward (agreeing on the order of buckets)", true, 1},
    Traits{"forward (waiting for rank 0's buffers)", true, 2},
    Traits{"forward", false, 3},
    Traits{"backward", false, 4},
    Traits{"communication hook", false, 4},
    Traits{"communication hook", false, 4},
    Traits{"backward (waiting for the last step's agreement on used parameters)", true, 4},
    Traits{"waiting for buckets", true, 4},
    Traits{"agreeing at the end of the step", true, 5},
};
static_assert(kTraits.size() == static_cast<std::size_t>(Doing::kAgreeing) + 1);

// Of a number that is no Doing, which memory of another process may hold: as outside a step.
const Traits& traits(Doing doing) {
  const auto index = static_cast<std::size_t>(doing);
  return kTraits[index < kTraits.size() ? index : static_cast<std::size_t>(Doing::kOutside)];
}

}  // namespace

const char* to_string(Doing doing) {
  return traits(doing).name;
}

bool waits_for_peers(Doing doing) {
  return traits(doing).waits_for_peers;
}

bool may_wait(Doing doing) {
  return waits_for_peers(doing) || doing == Doing::kHook;
}

uint8_t stage_of(Doing doing) {
  return traits(doing).stage;
}

int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_BOOTTIME, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace ddpx::health
