// What a report says of a step, and that it says nothing of another one.
#include "observe/step_clock.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "observe/event_log.h"
#include "replica.h"

namespace ddpx {
namespace {

constexpr auto kLaunchesAStep = static_cast<int64_t>(Replica::kNumParams);  // of kParamABucket

void expect_own_step(const StepReport& report) {
  EXPECT_EQ(report.num_launches, kLaunchesAStep);
  const auto [forward_start, backward_start, backward_end, comm_start, comm_end] = report.moments;
  EXPECT_LE(forward_start, backward_start);
  EXPECT_LE(backward_start, comm_start);
  EXPECT_LE(backward_start, backward_end);
  EXPECT_LE(comm_start, comm_end);
}

TEST(StepClock, CountsStepsFromZero) {
  Replica replica;
  EXPECT_EQ(replica.reducer->state().report().step, -1);
  replica.learn();
  const auto learned = replica.reducer->state().report().step;
  replica.step();
  EXPECT_EQ(replica.reducer->state().report().step, learned + 1);
  expect_own_step(replica.reducer->state().report());
}

TEST(StepClock, ForgetsABrokenStep) {
  Replica replica;
  replica.learn();
  const auto key = replica.params[0].register_hook(
      [](const at::Tensor&) -> void { throw std::domain_error("boom"); });
  EXPECT_THROW(replica.step(), std::domain_error);
  replica.params[0].remove_hook(key);
  replica.step();
  expect_own_step(replica.reducer->state().report());
}

TEST(StepClock, ForgetsAShadowedStep) {
  Replica replica;
  replica.learn();
  replica.reducer->shadow_step();
  replica.step();
  expect_own_step(replica.reducer->state().report());
}

TEST(StepClock, SamplesEveryNthStepAfterTheFirstTen) {
  StepClock clock;
  clock.set_sample_rate(7);
  std::vector<int64_t> reported;
  for (int64_t step = 0; step < 22; ++step) {
    clock.begin_step();
    clock.record(Moment::kBackwardStart, step);
    clock.record_launch(step);
    clock.record(Moment::kBackwardEnd, step);
    clock.record(Moment::kCommEnd, step);
    clock.end_step(step);
    if (clock.report().step == step) {
      reported.push_back(step);
      EXPECT_EQ(clock.report().num_launches, 1);
    }
  }
  EXPECT_EQ(reported, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 21}));
}

TEST(StepClock, CommunicationStartsWithTheFirstLaunch) {
  StepClock clock;
  clock.record_launch(0);
  const auto after_first = steady_now();
  while (steady_now() == after_first) {
  }
  clock.record_launch(0);
  clock.end_step(0);
  const auto comm_start = clock.report().moments[static_cast<std::size_t>(Moment::kCommStart)];
  EXPECT_LE(comm_start, after_first);
  EXPECT_EQ(clock.report().num_launches, 2);
}

TEST(StepClock, WithoutAForwardThereIsNoTimeForIt) {
  StepClock clock;
  clock.record(Moment::kBackwardStart, 0);
  clock.end_step(0);
  EXPECT_EQ(clock.report().times.forward, 0);
}

}  // namespace
}  // namespace ddpx
