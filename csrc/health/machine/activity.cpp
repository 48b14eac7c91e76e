#include "activity.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <tuple>

namespace ddpx::health {
namespace {

struct Traits {
  const char* name;
  bool waits_for_peers;
};

// Indexed by Doing.
constexpr std::array kTraits{
    Traits{"construction", false},
    Traits{"construction", true},
    Traits{"between steps", false},
    Traits{"forward (agreeing on the order of buckets)", true},
    Traits{"forward (waiting for rank 0's buffers)", true},
    Traits{"forward", false},
    Traits{"backward", false},
    Traits{"communication hook", false},
    Traits{"communication hook", false},
    Traits{"backward (waiting for the last step's agreement on used parameters)", true},
    Traits{"waiting for buckets", true},
    Traits{"agreeing at the end of the step", true},
    Traits{"between backward and finalize_backward()", false},
};
static_assert(kTraits.size() == static_cast<std::size_t>(Doing::kPending) + 1);

const Traits& traits(Doing doing) {
  return kTraits.at(static_cast<std::size_t>(doing));
}

// The progress of a rank in the collective calls of its wrapper.
using Progress = std::tuple<uint32_t, Doing, uint32_t>;  // step, stage, number of launches

Progress progress(const Activity& activity, uint32_t num_launched) {
  const auto doing = std::max(activity.doing, Doing::kOutside);  // a construction has one stage
  const bool in_backward = doing >= Doing::kBackward && doing <= Doing::kWaiting;
  return {activity.step, in_backward ? Doing::kBackward : doing, num_launched};
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

bool is_about_a_bucket(Doing doing) {
  return doing == Doing::kHook || doing == Doing::kBrokenHook || doing == Doing::kWaiting;
}

uint64_t Activity::packed() const {
  return uint64_t{static_cast<uint8_t>(doing)} << 56 | uint64_t{model} << 48 |
         uint64_t{bucket} << 32 | step;
}

// Another process may have written any number.
Activity Activity::unpacked(uint64_t word, int64_t since_ns) {
  const auto doing = std::min(word >> 56, uint64_t{static_cast<uint8_t>(Doing::kPending)});
  return Activity{
      static_cast<Doing>(doing),
      static_cast<uint8_t>(word >> 48),
      static_cast<uint16_t>(word >> 32),
      static_cast<uint32_t>(word),
      since_ns};
}

bool is_behind(const Activity& theirs, const Activity& ours) {
  if (theirs.model != ours.model) {
    // The rank works on another wrapper. It has ended a construction if its wrapper is not older.
    return ours.model != kNoModel || theirs.model >= kNumModels || theirs.model + 1u < ours.step;
  }
  const bool we_are_in_hook = ours.doing == Doing::kHook;
  const bool they_are_in_hook = theirs.doing == Doing::kHook || theirs.doing == Doing::kBrokenHook;
  const bool needs_bucket = we_are_in_hook || ours.doing == Doing::kWaiting;
  // A bucket is launched when its hook returns. Hooks wait for ranks that have not called theirs.
  const uint32_t launched = theirs.doing == Doing::kWaiting ? std::numeric_limits<uint32_t>::max()
                            : we_are_in_hook && they_are_in_hook ? theirs.bucket + 1u
                                                                 : theirs.bucket;
  const uint32_t needed = needs_bucket ? ours.bucket + 1u : ours.bucket;
  return progress(theirs, launched) < progress(ours, needed);
}

void SharedActivity::store(const Activity& activity) {
  since_ns_.store(activity.since_ns, std::memory_order_relaxed);
  word_.store(activity.packed(), std::memory_order_release);
}

Activity SharedActivity::load() const {
  const auto word = word_.load(std::memory_order_acquire);
  return Activity::unpacked(word, since_ns_.load(std::memory_order_relaxed));
}

std::optional<Activity> SharedActivity::known() const {
  const bool is_known = since_ns_.load(std::memory_order_relaxed) != 0;
  return is_known ? std::make_optional(load()) : std::nullopt;
}

}  // namespace ddpx::health
