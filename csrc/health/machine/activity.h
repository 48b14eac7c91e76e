// The activity of a rank, as published to its peers.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "clock.h"

namespace ddpx::health {

enum class Doing : uint8_t {
  kConstructing,  // constructing a wrapper, between two collective calls
  kConstruction,  // constructing a wrapper, in a collective call
  kOutside,       // between steps: in the user's code
  kRebuilding,    // before a forward: ranks agree on the order of buckets
  kBuffers,       // before a forward: rank 0 broadcasts its buffers
  kForward,
  kBackward,
  kHook,        // in a communication hook of the user
  kBrokenHook,  // after a hook raised, until the next forward: the rank waits for no peer
  kSettling,    // after backward: waiting for the previous step's agreement on used params
  kWaiting,     // after backward: waiting for the all-reduce of a bucket
  kAgreeing,    // after the buckets: agreeing on used params, or on finite gradients
  kPending,     // after backward: all calls are launched, and finalize_backward() has not run
};

const char* to_string(Doing doing);

// Whether a rank blocks on its peers in this state.
bool waits_for_peers(Doing doing);

// waits_for_peers(), or kHook: a hook may block or compute.
bool may_wait(Doing doing);

// Whether a rank in this state works on a certain bucket.
bool is_about_a_bucket(Doing doing);

// The number of a wrapper, the same on all ranks. Wrappers that all ranks construct together are
// numbered from 0 on, in this order. Others (copies, which some ranks may make alone; wrappers
// without init_sync) are numbered from kFirstOther on, in the order of their first launches.
constexpr uint32_t kFirstOther = uint32_t{1} << 31;
constexpr uint32_t kUnnumbered = UINT32_MAX - 1;  // a wrapper that has launched nothing yet

// The number of a wrapper in one byte: below kNumModels for wrappers that all ranks constructed
// together. Numbers of each kind repeat after kNumModels.
constexpr uint8_t kNumModels = 127;
constexpr uint8_t kNotNumbered = 254;
constexpr uint8_t kNoModel = 255;  // a wrapper under construction

constexpr uint8_t model_of(uint32_t wrapper) {
  const uint32_t first = wrapper < kFirstOther ? 0 : kNumModels;
  return wrapper == kUnnumbered ? kNotNumbered : static_cast<uint8_t>(first + wrapper % kNumModels);
}

// `bucket` is the bucket that the rank works on, or else the next bucket that the rank launches.
// With `kNoModel`, `bucket` is the number of collective calls of the construction, and `step` is
// the number of constructions.
struct Activity {
  Doing doing = Doing::kOutside;
  uint8_t model = 0;
  uint16_t bucket = 0;
  uint32_t step = 0;
  int64_t since_ns = 0;  // by now_ns()

  // -1 in a construction.
  int64_t training_step() const {
    return model == kNoModel ? -1 : int64_t{step};
  }

  // All members except `since_ns`.
  uint64_t packed() const;
  static Activity unpacked(uint64_t word, int64_t since_ns);
};

// Whether a rank at `theirs` has not begun a collective call that a rank at `ours` waits for. All
// ranks make their calls in the same order.
bool is_behind(const Activity& theirs, const Activity& ours);

// An activity in memory that processes share. The activity is one word, so a reader never reads
// half of it. Zeroed memory is an unknown activity.
class SharedActivity {
 public:
  void store(const Activity& activity);
  Activity load() const;
  std::optional<Activity> known() const;  // nullopt if unknown
  void forget() {
    since_ns_.store(0, std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t> word_;
  std::atomic<int64_t> since_ns_;
};

}  // namespace ddpx::health
