// When a gradient is final, and which params are missing, in all three modes.
#include "arrival_tracker.h"

#include <gtest/gtest.h>

#include <vector>

namespace ddpx {
namespace {

using Indices = std::vector<std::size_t>;

class ArrivalTrackerEveryBackward : public testing::TestWithParam<GraphMode> {};

TEST_P(ArrivalTrackerEveryBackward, TheFirstArrivalIsFinalAndASecondIsRepeated) {
  ArrivalTracker tracker(2, GetParam());
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
  tracker.begin();
  tracker.arrive(0);
  tracker.end();
  EXPECT_EQ(tracker.known_unused(), Indices{});
  tracker.begin();
  EXPECT_EQ(tracker.missing(), (Indices{0, 1}));
  EXPECT_EQ(tracker.arrive(0), Arrival::kFinal);
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
