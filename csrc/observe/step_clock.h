// When the parts of a step began and ended, on the host's clock, for sampled steps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ddpx {

enum class Moment {
  kForwardStart,
  kBackwardStart,  // the first gradient
  kBackwardEnd,
  kCommStart,  // the first bucket leaves
  kCommEnd,    // the last bucket is back
};

// Nanoseconds; 0 where nothing was measured.
struct StepTimes {
  int64_t forward = 0;   // start of forward to the first gradient
  int64_t backward = 0;  // first gradient to the end of backward
  int64_t comm = 0;      // first launch to the last bucket's return
  int64_t overlap = 0;   // of it, before the end of backward
};

struct StepReport {
  int64_t step = -1;  // counted from 0; -1 before the first sampled one ends
  StepTimes times;
  StepTimes mean;
  int64_t num_launches = 0;          // buckets that were communicated
  std::array<int64_t, 5> moments{};  // steady clock, by Moment
};

// On a device the moments are those of the calls, not of the kernels that they queue. The first 10
// steps are sampled, then every `sample_rate`-th. Not thread-safe: the reducer's mutex guards it.
class StepClock {
 public:
  void set_sample_rate(int64_t sample_rate) {
    sample_rate_ = sample_rate;
  }

  // As if so many steps had been made.
  void count_from(int64_t num_steps) {
    num_steps_ = num_steps;
  }

  void note(Moment moment);

  // As note(), but only the first time in a step.
  void note_first(Moment moment);

  // Forgets what was noted of a step that did not end, but for the start of forward.
  void begin_step();

  // A bucket leaves.
  void note_launch() {
    note_first(Moment::kCommStart);
    ++num_launches_;
  }

  // A synchronised step has come to its end.
  void end_step();

  // A synchronised step of the other ranks, in which this one has no gradients, has ended.
  void skip_step();

  // Of the last sampled step.
  const StepReport& report() const {
    return report_;
  }

  int64_t num_steps() const {
    return num_steps_;
  }

  // As if so many steps had been made, by ranks that this one catches up with.
  void catch_up(int64_t num_steps) {
    num_steps_ = num_steps;
  }

 private:
  bool sampled() const {
    return num_steps_ < 10 || num_steps_ % sample_rate_ == 0;
  }

  int64_t sample_rate_ = 100;
  int64_t num_steps_ = 0;
  int64_t num_sampled_ = 0;
  int64_t num_launches_ = 0;
  std::array<int64_t, 5> moments_{};
  StepTimes sums_;
  StepReport report_;
};

}  // namespace ddpx
