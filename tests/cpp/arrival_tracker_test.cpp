// When a gradient is final, and which params are missing, in all three modes.
#include "readiness/arrival_tracker.h"

#include <gtest/gtest.h>

#include <vector>

namespace ddpx {
namespace {

using Indices = std::vector<std::size_t>;

// A step with these arrivals comes to its end.
void learn(ArrivalHistory& history, const Indices& arrivals) {
  ArrivalTracker tracker(history);
  for (const auto param_index : arrivals) {
    tracker.arrive(param_index);
  }
  history.learn(tracker);
}

class ArrivalTrackerEveryBackward : public testing::TestWithParam<GraphMode> {};

TEST_P(ArrivalTrackerEveryBackward, NothingIsFinalWhileLearning) {
  ArrivalHistory history(2, GetParam());
  ArrivalTracker tracker(history);
  EXPECT_TRUE(history.learning());
  EXPECT_EQ(tracker.arrive(1), Arrival::kPartial);
  EXPECT_EQ(tracker.arrive(1), Arrival::kPartial);
  EXPECT_EQ(tracker.missing(), Indices{0});
  EXPECT_EQ(tracker.unfinished(), (Indices{0, 1}));
}

TEST_P(ArrivalTrackerEveryBackward, TheFirstArrivalIsFinalAndASecondIsRepeated) {
  ArrivalHistory history(2, GetParam());
  learn(history, {0, 1});
  ArrivalTracker tracker(history);
  EXPECT_FALSE(history.learning());
  EXPECT_EQ(tracker.arrive(1), Arrival::kFinal);
  EXPECT_EQ(tracker.arrive(1), Arrival::kRepeated);
  EXPECT_EQ(tracker.arrive(0), Arrival::kFinal);
}

TEST_P(ArrivalTrackerEveryBackward, MissingAreThoseThatDidNotArrive) {
  ArrivalHistory history(3, GetParam());
  ArrivalTracker tracker(history);
  EXPECT_EQ(tracker.missing(), (Indices{0, 1, 2}));
  tracker.arrive(1);
  EXPECT_EQ(tracker.missing(), (Indices{0, 2}));
  tracker.arrive(2);
  tracker.arrive(0);
  EXPECT_EQ(tracker.missing(), Indices{});
}

TEST_P(ArrivalTrackerEveryBackward, NothingIsCarriedToTheNextBackward) {
  ArrivalHistory history(2, GetParam());
  learn(history, {0});
  EXPECT_EQ(history.known_unused(), Indices{});
  ArrivalTracker tracker(history);
  EXPECT_EQ(tracker.missing(), (Indices{0, 1}));
  EXPECT_EQ(tracker.arrive(0), Arrival::kFinal);
  EXPECT_EQ(tracker.arrive(1), Arrival::kFinal) << "nothing makes it unused for ever";
}

TEST_P(ArrivalTrackerEveryBackward, AsManyPartsAsEverCameMakeAGradientFinal) {
  ArrivalHistory history(2, GetParam());
  learn(history, {0, 1, 0});
  learn(history, {0, 1, 0, 0});
  learn(history, {0, 1});
  ArrivalTracker tracker(history);
  EXPECT_EQ(tracker.arrive(0), Arrival::kPartial);
  EXPECT_EQ(tracker.arrive(0), Arrival::kPartial);
  EXPECT_EQ(tracker.unfinished(), (Indices{0, 1}));
  EXPECT_EQ(tracker.missing(), Indices{1}) << "fewer parts than ever are no error";
  EXPECT_EQ(tracker.arrive(0), Arrival::kFinal);
  EXPECT_EQ(tracker.arrive(0), Arrival::kRepeated);
}

TEST_P(ArrivalTrackerEveryBackward, FrozenParamsAreNotWaitedFor) {
  ArrivalHistory history(3, GetParam());
  ArrivalTracker tracker(history, {1});
  EXPECT_EQ(tracker.missing(), (Indices{0, 2}));
  EXPECT_EQ(tracker.arrive(1), Arrival::kFrozen);
  EXPECT_TRUE(tracker.arrived(1));
  EXPECT_EQ(tracker.unfinished(), (Indices{0, 2}));
  history.learn(tracker);
  ArrivalTracker next(history);
  EXPECT_EQ(next.missing(), (Indices{0, 1, 2})) << "absent in one backward only";
  EXPECT_EQ(next.arrive(1), Arrival::kFinal);
}

TEST_P(ArrivalTrackerEveryBackward, UnusedParamsAreNotWaitedForOnceAllIsLearned) {
  ArrivalHistory history(3, GetParam());
  ArrivalTracker tracker(history, {}, {1});
  EXPECT_EQ(tracker.unused(), Indices());
  EXPECT_EQ(tracker.unfinished(), (Indices{0, 1, 2})) << "a later task may bring it";
  for (std::size_t i = 0; i < 3; ++i) {
    tracker.arrive(i);
  }
  history.learn(tracker);
  ArrivalTracker next(history, {0}, {0, 1});
  EXPECT_EQ(next.unused(), Indices{1});
  EXPECT_EQ(next.unfinished(), Indices{2});
  EXPECT_EQ(next.arrive(1), Arrival::kUnforeseen);
  EXPECT_EQ(next.arrive(0), Arrival::kFrozen);
}

TEST_P(ArrivalTrackerEveryBackward, TellsWhetherAllBackwardsWereTheSame) {
  ArrivalHistory history(2, GetParam());
  EXPECT_TRUE(history.always_the_same());
  learn(history, {0});
  learn(history, {0});
  EXPECT_TRUE(history.always_the_same());
  learn(history, {0, 1});
  learn(history, {0, 1});
  EXPECT_FALSE(history.always_the_same());
}

INSTANTIATE_TEST_SUITE_P(
    Modes,
    ArrivalTrackerEveryBackward,
    testing::Values(GraphMode::kDefault, GraphMode::kFindUnused),
    [](const auto& info) { return info.param == GraphMode::kDefault ? "Default" : "FindUnused"; });

// Param 0 arrives once, param 1 twice, param 2 never.
ArrivalHistory learned_history() {
  ArrivalHistory history(3, GraphMode::kStatic);
  learn(history, {1, 0, 1});
  return history;
}

TEST(ArrivalTrackerStatic, NothingIsFinalWhileLearning) {
  const ArrivalHistory history(3, GraphMode::kStatic);
  ArrivalTracker tracker(history);
  EXPECT_TRUE(history.learning());
  EXPECT_EQ(tracker.arrive(1), Arrival::kPartial);
  EXPECT_EQ(tracker.arrive(0), Arrival::kPartial);
  EXPECT_EQ(tracker.arrive(1), Arrival::kPartial);
  EXPECT_EQ(tracker.missing(), Indices{2});
  EXPECT_EQ(history.known_unused(), Indices{});
}

TEST(ArrivalTrackerStatic, ALearningStepThatBrokeOffTeachesNothing) {
  const ArrivalHistory history(2, GraphMode::kStatic);
  {
    ArrivalTracker broken(history);
    broken.arrive(0);
  }
  EXPECT_TRUE(history.learning());
  EXPECT_EQ(ArrivalTracker(history).missing(), (Indices{0, 1}));
}

TEST(ArrivalTrackerStatic, TheNthArrivalIsFinal) {
  const auto history = learned_history();
  ArrivalTracker tracker(history);
  EXPECT_FALSE(history.learning());
  EXPECT_EQ(tracker.arrive(1), Arrival::kPartial);
  EXPECT_EQ(tracker.arrive(0), Arrival::kFinal);
  EXPECT_EQ(tracker.arrive(1), Arrival::kFinal);
  EXPECT_EQ(tracker.missing(), Indices{});
}

TEST(ArrivalTrackerStatic, MissingIncludesThoseThatArrivedTooSeldom) {
  const auto history = learned_history();
  ArrivalTracker tracker(history);
  tracker.arrive(1);
  EXPECT_EQ(tracker.missing(), (Indices{0, 1}));
}

TEST(ArrivalTrackerStatic, MoreArrivalsThanLearnedAreRepeated) {
  const auto history = learned_history();
  ArrivalTracker tracker(history);
  tracker.arrive(0);
  EXPECT_EQ(tracker.arrive(0), Arrival::kRepeated);
  EXPECT_EQ(tracker.arrive(2), Arrival::kRepeated);  // learned to be unused
}

TEST(ArrivalTrackerStatic, KnownUnusedAreNeverMissing) {
  const auto history = learned_history();
  EXPECT_EQ(history.known_unused(), Indices{2});
  EXPECT_EQ(ArrivalTracker(history).missing(), (Indices{0, 1}));
}

TEST(ArrivalTrackerStatic, OnlyTheFirstCompleteStepTeaches) {
  auto history = learned_history();
  learn(history, {0});
  EXPECT_EQ(ArrivalTracker(history).arrive(1), Arrival::kPartial);
  EXPECT_EQ(history.known_unused(), Indices{2});
}

}  // namespace
}  // namespace ddpx
