// When a gradient is final, and which params are missing, in all three modes.
#include "readiness/arrival_tracker.h"

#include <gtest/gtest.h>

#include <vector>

namespace ddpx {
namespace {

using Indices = std::vector<std::size_t>;

void learn(ArrivalTracker& tracker, const Indices& arrivals) {
  tracker.begin();
  for (const auto param_index : arrivals) {
    tracker.arrive(param_index);
  }
  tracker.end();
}

class ArrivalTrackerEveryBackward : public testing::TestWithParam<GraphMode> {};

TEST_P(ArrivalTrackerEveryBackward, NothingIsFinalWhileLearning) {
  ArrivalTracker tracker(2, GetParam());
  tracker.begin();
  EXPECT_TRUE(tracker.learning());
  EXPECT_EQ(tracker.arrive(1), Arrival::kPartial);
  EXPECT_EQ(tracker.arrive(1), Arrival::kPartial);
  EXPECT_EQ(tracker.missing(), Indices{0});
  EXPECT_EQ(tracker.unfinished(), (Indices{0, 1}));
}

TEST_P(ArrivalTrackerEveryBackward, TheFirstArrivalIsFinalAndASecondIsRepeated) {
  ArrivalTracker tracker(2, GetParam());
  learn(tracker, {0, 1});
  tracker.begin();
  EXPECT_FALSE(tracker.learning());
  EXPECT_EQ(tracker.arrive(1), Arrival::kFinal);
  EXPECT_EQ(tracker.arrive(1), Arrival::kRepeated);
  EXPECT_EQ(tracker.arrive(0), Arrival::kFinal);
}

TEST_P(ArrivalTrackerEveryBackward, MissingAreThoseThatDidNotArrive) {
  ArrivalTracker tracker(3, GetParam());
  tracker.begin();
  EXPECT_EQ(tracker.missing(), (Indices{0, 1, 2}));
  tracker.arrive(1);
  EXPECT_EQ(tracker.missing(), (Indices{0, 2}));
  tracker.arrive(2);
  tracker.arrive(0);
  EXPECT_EQ(tracker.missing(), Indices{});
}

TEST_P(ArrivalTrackerEveryBackward, NothingIsCarriedToTheNextBackward) {
  ArrivalTracker tracker(2, GetParam());
  learn(tracker, {0});
  EXPECT_EQ(tracker.known_unused(), Indices{});
  tracker.begin();
  EXPECT_EQ(tracker.missing(), (Indices{0, 1}));
  EXPECT_EQ(tracker.arrive(0), Arrival::kFinal);
  EXPECT_EQ(tracker.arrive(1), Arrival::kFinal) << "nothing makes it unused for ever";
}

TEST_P(ArrivalTrackerEveryBackward, AsManyPartsAsEverCameMakeAGradientFinal) {
  ArrivalTracker tracker(2, GetParam());
  learn(tracker, {0, 1, 0});
  learn(tracker, {0, 1, 0, 0});
  learn(tracker, {0, 1});
  tracker.begin();
  EXPECT_EQ(tracker.arrive(0), Arrival::kPartial);
  EXPECT_EQ(tracker.arrive(0), Arrival::kPartial);
  EXPECT_EQ(tracker.unfinished(), (Indices{0, 1}));
  EXPECT_EQ(tracker.missing(), Indices{1}) << "fewer parts than ever are no error";
  EXPECT_EQ(tracker.arrive(0), Arrival::kFinal);
  EXPECT_EQ(tracker.arrive(0), Arrival::kRepeated);
}

TEST_P(ArrivalTrackerEveryBackward, FrozenParamsAreNotWaitedFor) {
  ArrivalTracker tracker(3, GetParam());
  tracker.begin({1});
  EXPECT_EQ(tracker.missing(), (Indices{0, 2}));
  EXPECT_EQ(tracker.arrive(1), Arrival::kFrozen);
  EXPECT_TRUE(tracker.arrived(1));
  EXPECT_EQ(tracker.unfinished(), (Indices{0, 2}));
  tracker.end();
  tracker.begin();
  EXPECT_EQ(tracker.missing(), (Indices{0, 1, 2})) << "absent in one backward only";
  EXPECT_EQ(tracker.arrive(1), Arrival::kFinal);
}

TEST_P(ArrivalTrackerEveryBackward, UnusedParamsAreNotWaitedForOnceAllIsLearned) {
  ArrivalTracker tracker(3, GetParam());
  tracker.begin({}, {1});
  EXPECT_EQ(tracker.unused(), Indices());
  EXPECT_EQ(tracker.unfinished(), (Indices{0, 1, 2})) << "a later task may bring it";
  for (std::size_t i = 0; i < 3; ++i) {
    tracker.arrive(i);
  }
  tracker.end();
  tracker.begin({0}, {0, 1});
  EXPECT_EQ(tracker.unused(), Indices{1});
  EXPECT_EQ(tracker.unfinished(), Indices{2});
  EXPECT_EQ(tracker.arrive(1), Arrival::kUnforeseen);
  EXPECT_EQ(tracker.arrive(0), Arrival::kFrozen);
}

TEST_P(ArrivalTrackerEveryBackward, TellsWhetherAllBackwardsWereTheSame) {
  ArrivalTracker tracker(2, GetParam());
  EXPECT_TRUE(tracker.always_the_same());
  learn(tracker, {0});
  learn(tracker, {0});
  EXPECT_TRUE(tracker.always_the_same());
  learn(tracker, {0, 1});
  learn(tracker, {0, 1});
  EXPECT_FALSE(tracker.always_the_same());
}

INSTANTIATE_TEST_SUITE_P(
    Modes,
    ArrivalTrackerEveryBackward,
    testing::Values(GraphMode::kDefault, GraphMode::kFindUnused),
    [](const auto& info) { return info.param == GraphMode::kDefault ? "Default" : "FindUnused"; });

// Param 0 arrives once, param 1 twice, param 2 never.
ArrivalTracker tracker_that_has_learned() {
  ArrivalTracker tracker(3, GraphMode::kStatic);
  tracker.begin();
  tracker.arrive(1);
  tracker.arrive(0);
  tracker.arrive(1);
  tracker.end();
  tracker.begin();
  return tracker;
}

TEST(ArrivalTrackerStatic, NothingIsFinalWhileLearning) {
  ArrivalTracker tracker(3, GraphMode::kStatic);
  tracker.begin();
  EXPECT_TRUE(tracker.learning());
  EXPECT_EQ(tracker.arrive(1), Arrival::kPartial);
  EXPECT_EQ(tracker.arrive(0), Arrival::kPartial);
  EXPECT_EQ(tracker.arrive(1), Arrival::kPartial);
  EXPECT_EQ(tracker.missing(), Indices{2});
  EXPECT_EQ(tracker.known_unused(), Indices{});
}

TEST(ArrivalTrackerStatic, ALearningBackwardThatBrokeOffTeachesNothing) {
  ArrivalTracker tracker(2, GraphMode::kStatic);
  tracker.begin();
  tracker.arrive(0);
  tracker.begin();  // end() was never called
  EXPECT_TRUE(tracker.learning());
  EXPECT_EQ(tracker.missing(), (Indices{0, 1}));
}

TEST(ArrivalTrackerStatic, TheNthArrivalIsFinal) {
  auto tracker = tracker_that_has_learned();
  EXPECT_FALSE(tracker.learning());
  EXPECT_EQ(tracker.arrive(1), Arrival::kPartial);
  EXPECT_EQ(tracker.arrive(0), Arrival::kFinal);
  EXPECT_EQ(tracker.arrive(1), Arrival::kFinal);
  EXPECT_EQ(tracker.missing(), Indices{});
}

TEST(ArrivalTrackerStatic, MissingIncludesThoseThatArrivedTooSeldom) {
  auto tracker = tracker_that_has_learned();
  tracker.arrive(1);
  EXPECT_EQ(tracker.missing(), (Indices{0, 1}));
}

TEST(ArrivalTrackerStatic, MoreArrivalsThanLearnedAreRepeated) {
  auto tracker = tracker_that_has_learned();
  tracker.arrive(0);
  EXPECT_EQ(tracker.arrive(0), Arrival::kRepeated);
  EXPECT_EQ(tracker.arrive(2), Arrival::kRepeated);  // learned to be unused
}

TEST(ArrivalTrackerStatic, KnownUnusedAreNeverMissing) {
  const auto tracker = tracker_that_has_learned();
  EXPECT_EQ(tracker.known_unused(), Indices{2});
  EXPECT_EQ(tracker.missing(), (Indices{0, 1}));
}

TEST(ArrivalTrackerStatic, OnlyTheFirstCompleteBackwardTeaches) {
  auto tracker = tracker_that_has_learned();
  tracker.arrive(0);
  tracker.end();
  tracker.begin();
  EXPECT_EQ(tracker.arrive(1), Arrival::kPartial);
  EXPECT_EQ(tracker.known_unused(), Indices{2});
}

}  // namespace
}  // namespace ddpx
