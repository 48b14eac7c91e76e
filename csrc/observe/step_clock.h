// When the parts of a step began and ended, on the host's clock, for sampled steps.
#pragma once

#include <array>
#include <cstdint>

namespace ddpx {

enum class Moment {
  kForwardStart,
  kBackwardStart,  // the first gradient
  kBackwardEnd,
  kCommStart,  // the first bucket is launched
  kCommEnd,    // the last bucket is reduced
};

// Nanoseconds; 0 where nothing was measured.
struct StepTimes {
  int64_t forward = 0;   // start of forward to the first gradient
  int64_t backward = 0;  // first gradient to the end of backward
  int64_t comm = 0;      // first launch to the end of the last reduction
  int64_t overlap = 0;   // the part of `comm` before the end of backward
};

struct StepReport {
  int64_t step = -1;  // counted from 0; -1 before the first sampled step ends
  StepTimes times;
  StepTimes mean;
  int64_t num_launches = 0;          // number of buckets that were communicated
  std::array<int64_t, 5> moments{};  // steady clock, by Moment
};

// On a device the moments are those of the calls, not of the kernels that the calls queue. The
// first 10 steps are sampled, then every `sample_rate`-th. The observer owns the clock, under the
// mutex of the reducer. `step` is the number of the step that runs, counted from 0.
class StepClock {
 public:
  void set_sample_rate(int64_t sample_rate) {
    sample_rate_ = sample_rate;
  }

  void record(Moment moment, int64_t step);

  // A bucket is launched.
  void record_launch(int64_t step);

  // Forgets the moments of a step that did not end, except the start of forward.
  void begin_step();

  // A synchronized step has come to its end.
  void end_step(int64_t step);

  // Forgets all moments: the step that runs gives no report.
  void skip_step();

  // The report of the last sampled step.
  const StepReport& report() const {
    return report_;
  }

 private:
  bool sampled(int64_t step) const {
    return step < 10 || step % sample_rate_ == 0;
  }

  int64_t sample_rate_ = 100;
  int64_t num_sampled_ = 0;
  int64_t num_launches_ = 0;
  std::array<int64_t, 5> moments_{};
  StepTimes sums_;
  StepReport report_;
};

}  // namespace ddpx
