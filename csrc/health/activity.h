// What a rank is doing, as its peers may see it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

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
};

const char* to_string(Doing doing);

// Whether it is peers that a rank waits for, while it does that.
bool waits_for_peers(Doing doing);

// The same, or a hook, which may compute, too.
bool may_wait(Doing doing);

// The number of a wrapper that is being made; its step is then how many this rank began to make.
constexpr uint8_t kNoModel = 255;

// Wrappers have numbers that are the same on all ranks: those that all ranks constructed together
// by the order of that; others (copies, as some ranks may make alone, and those that did without
// synchronisation) by the order in which they first launch a bucket.
constexpr uint8_t kNumConstructed = 128;  // 0 to 127, around and around
constexpr uint8_t kNumOthers = 126;       // from 128 on
constexpr uint8_t kNotNumbered = 254;     // one that has launched nothing yet

// The same numbers before they go around: those of others begin here.
constexpr uint32_t kFirstOther = uint32_t{1} << 31;

constexpr uint8_t model_of(uint32_t wrapper) {
  return static_cast<uint8_t>(
      wrapper < kFirstOther ? wrapper % kNumConstructed
                            : kNumConstructed + (wrapper - kFirstOther) % kNumOthers);
}

// Packed into one word, so that nobody sees half of it.
struct Activity {
  Doing doing = Doing::kOutside;
  uint8_t model = 0;    // which wrapper: see kNumConstructed
  uint16_t bucket = 0;  // of hooks and kWaiting
  uint32_t step = 0;
  int64_t since_ns = 0;  // by now_ns()

  // -1 if it is no step that this is about, but a construction.
  int64_t training_step() const {
    return model == kNoModel ? -1 : int64_t{step};
  }

  uint64_t packed() const {
    return uint64_t{static_cast<uint8_t>(doing)} << 56 | uint64_t{model} << 48 |
           uint64_t{bucket} << 32 | step;
  }
  static Activity unpacked(uint64_t word, int64_t since_ns) {
    const auto doing = std::min(word >> 56, uint64_t{static_cast<uint8_t>(Doing::kAgreeing)});
    return Activity{
        static_cast<Doing>(doing),
        static_cast<uint8_t>(word >> 48),
        static_cast<uint16_t>(word >> 32),
        static_cast<uint32_t>(word),
        since_ns};
  }
};

// How far a rank has come in the collective calls that all make in the same order. Comparable if
// `model` is the same.
struct Progress {
  uint8_t model = 0;
  uint32_t step = 0;
  uint8_t stage = 0;          // by Doing
  uint16_t num_launched = 0;  // buckets, in this step; calls, in a construction

  uint64_t packed() const {
    return uint64_t{model} << 56 | uint64_t{step} << 24 | uint64_t{stage} << 16 | num_launched;
  }
  static Progress unpacked(uint64_t word) {
    return Progress{
        static_cast<uint8_t>(word >> 56),
        static_cast<uint32_t>(word >> 24),
        static_cast<uint8_t>(word >> 16),
        static_cast<uint16_t>(word)};
  }
};

// The place among a step's collective calls of what a rank does; the same for all of backward.
uint8_t stage_of(Doing doing);

// Nanoseconds since the start of the machine. The clock is the same for all its processes, and goes
// on while the machine is suspended.
int64_t now_ns();

}  // namespace ddpx::health
