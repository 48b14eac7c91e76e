#include "step_clock.h"

#include <algorithm>

#include "event_log.h"

namespace ddpx {
namespace {

constexpr std::array kParts = {
    &StepTimes::forward, &StepTimes::backward, &StepTimes::comm, &StepTimes::overlap};

}  // namespace

void StepClock::record(Moment moment, int64_t step) {
  if (sampled(step)) {
    moments_[static_cast<std::size_t>(moment)] = steady_now();
  }
}

void StepClock::record_launch(int64_t step) {
  if (moments_[static_cast<std::size_t>(Moment::kCommStart)] == 0) {
    record(Moment::kCommStart, step);
  }
  ++num_launches_;
}

void StepClock::begin_step() {
  const auto forward_start = moments_.front();
  moments_ = {forward_start};
  num_launches_ = 0;
}

void StepClock::end_step(int64_t step) {
  if (sampled(step)) {
    const auto [forward_start, backward_start, backward_end, comm_start, comm_end] = moments_;
    // A backward without a forward through the wrapper has no start of forward.
    const int64_t forward = forward_start == 0 ? 0 : backward_start - forward_start;
    const int64_t overlap = std::max<int64_t>(0, backward_end - comm_start);
    report_.times = {forward, backward_end - backward_start, comm_end - comm_start, overlap};
    ++num_sampled_;
    for (const auto part : kParts) {
      sums_.*part += report_.times.*part;
      report_.mean.*part = sums_.*part / num_sampled_;
    }
    report_.step = step;
    report_.num_launches = num_launches_;
    report_.moments = moments_;
  }
  skip_step();
}

void StepClock::skip_step() {
  moments_ = {};
  num_launches_ = 0;
}

}  // namespace ddpx
