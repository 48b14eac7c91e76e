// What a rank is doing, as its peers may see it.
#pragma once

#include <atomic>
#include <cstdint>

#include "clock.h"

namespace ddpx::health {

enum class Doing : uint8_t {
  kConstructing,  // a wrapper is made, between two collective calls of that
  kConstruction,  // in one: ranks compare their models, or take over rank 0's state
  kOutside,       // between steps: the user's code
  kRebuilding,    // at forward: ranks agree on the order of buckets
  kBuffers,       // at forward: rank 0's buffers are taken over
  kForward,
  kBackward,
  kHook,        // in a user's communication hook
  kBrokenHook,  // as its exception has left it, until the next forward: nothing is waited for
  kSettling,    // backward is over: which params the step before used is not agreed on yet
  kWaiting,     // backward is over: a bucket's all-reduce has not ended
  kAgreeing,    // behind the buckets: which params were used, whether all gradients are finite
  kPending,     // backward is over, and all calls are launched: finalize_backward() has not run
};

const char* to_string(Doing doing);

// Whether a rank waits for its peers while it does that.
bool waits_for_peers(Doing doing);

// The same, or a hook, which may compute, too.
bool may_wait(Doing doing);

// Whether a rank does that with a certain bucket.
bool is_about_a_bucket(Doing doing);

// The number of a wrapper, the same on all ranks. Wrappers that all ranks construct together are
// numbered from 0 on, in this order. Others (copies, which some ranks may make alone; wrappers
// without init_sync) are numbered from kFirstOther on, in the order of their first launches.
constexpr uint32_t kFirstOther = uint32_t{1} << 31;
constexpr uint32_t kUnnumbered = UINT32_MAX - 1;  // has launched nothing yet

// The same number in one byte: below kNumModels for wrappers that all ranks constructed together.
// Numbers of each kind repeat after kNumModels.
constexpr uint8_t kNumModels = 127;
constexpr uint8_t kNotNumbered = 254;
constexpr uint8_t kNoModel = 255;  // a wrapper under construction

constexpr uint8_t model_of(uint32_t wrapper) {
  const uint32_t first = wrapper < kFirstOther ? 0 : kNumModels;
  return wrapper == kUnnumbered ? kNotNumbered : static_cast<uint8_t>(first + wrapper % kNumModels);
}

// `bucket`: the bucket that `doing` is about, or else the next bucket that is launched. `kNoModel`
// counts collective calls of a construction in place of buckets, and constructions in place of
// steps.
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

  // All but `since_ns`.
  uint64_t packed() const;
  static Activity unpacked(uint64_t word, int64_t since_ns);
};

// Whether `theirs` has not begun a collective call for which a rank at `ours` waits. All ranks make
// their calls in the same order.
bool is_behind(const Activity& theirs, const Activity& ours);

// An activity in memory that processes share: one word, so that nobody reads half of it. Zeroed at
// first, which is unknown.
class SharedActivity {
 public:
  void store(const Activity& activity);
  Activity load() const;
  bool is_known() const {
    return since_ns_.load(std::memory_order_relaxed) != 0;
  }
  void forget() {
    since_ns_.store(0, std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t> word_;
  std::atomic<int64_t> since_ns_;
};

}  // namespace ddpx::health
