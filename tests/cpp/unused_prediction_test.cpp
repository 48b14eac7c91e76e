// Which params a backward does not use, by the table in unused_prediction.h.
#include "readiness/unused_prediction.h"

#include <gtest/gtest.h>

#include <vector>

namespace ddpx {
namespace {

using Indices = std::vector<std::size_t>;

constexpr GraphTaskId kOutermost{1, 0};
constexpr GraphTaskId kNested{2, 1};

TEST(UnusedPrediction, AnUnreachedParamIsUnusedWhereNothingNests) {
  UnusedPrediction prediction(3);
  prediction.begin(kOutermost, {false, true, false});
  EXPECT_EQ(prediction.unused(), Indices{1});
  EXPECT_FALSE(prediction.reaches_nothing());
}

TEST(UnusedPrediction, ABackwardMayReachNothing) {
  UnusedPrediction prediction(2);
  prediction.begin(kOutermost, {true, true});
  EXPECT_TRUE(prediction.reaches_nothing());
  EXPECT_EQ(prediction.unused(), (Indices{0, 1}));
}

TEST(UnusedPrediction, OnceATaskNestsUnknownParamsAreAwaited) {
  UnusedPrediction prediction(3);
  prediction.begin(kOutermost, {false, true, true});
  prediction.record_arrival(1, kNested);
  EXPECT_EQ(prediction.nested(), Indices{1});
  EXPECT_EQ(prediction.unused(), Indices()) << "param 2 may nest, too";
  EXPECT_FALSE(prediction.reaches_nothing());
}

TEST(UnusedPrediction, AParamThatArrivedDirectlySinceIsPredictedAgain) {
  UnusedPrediction prediction(3);
  prediction.begin(kOutermost, {false, true, false});
  prediction.record_arrival(1, kNested);
  prediction.begin({3, 0}, {false, true, false});
  prediction.record_arrival(2, {3, 0});
  prediction.begin({4, 0}, {false, true, true});
  EXPECT_EQ(prediction.unused(), Indices{2});
}

TEST(UnusedPrediction, OtherRanksTeachNesting) {
  UnusedPrediction prediction(2);
  prediction.begin(kOutermost, {false, true});
  prediction.learn_from_ranks({1, 1}, {0, 1});
  EXPECT_EQ(prediction.nested(), Indices{1});
  EXPECT_EQ(prediction.unused(), Indices());
}

TEST(UnusedPrediction, ALocalBackwardTeachesNesting) {
  UnusedPrediction prediction(2);
  prediction.record_local_arrival(0, kOutermost);
  EXPECT_EQ(prediction.nested(), Indices());
  prediction.record_local_arrival(0, kNested);
  EXPECT_EQ(prediction.nested(), Indices{0});
}

TEST(UnusedPrediction, TwoThreadsAwaitEveryParam) {
  UnusedPrediction prediction(2);
  prediction.begin(kOutermost, {false, true});
  prediction.record_arrival(1, {7, 0});
  EXPECT_EQ(prediction.unused(), Indices());
}

// The list of a nested task lacks what the outermost task reaches.
TEST(UnusedPrediction, AStepThatBeginsInANestedTaskAwaitsEveryParam) {
  UnusedPrediction prediction(2);
  prediction.begin(kOutermost, {false, true});
  prediction.record_arrival(1, kNested);
  prediction.begin({3, 0}, {false, true});
  prediction.record_arrival(0, {3, 0});
  prediction.begin({5, 1}, {true, false});
  EXPECT_EQ(prediction.unused(), Indices());
  prediction.begin({6, 0}, {true, false});
  EXPECT_EQ(prediction.unused(), Indices{0}) << "the outermost task lists everything";
}

TEST(UnusedPrediction, AParamThatArrivesAlthoughTheTaskDoesNotListItIsAwaited) {
  UnusedPrediction prediction(1);
  prediction.begin(kOutermost, {true});
  prediction.record_arrival(0, kOutermost);
  EXPECT_EQ(prediction.unused(), Indices());
}

TEST(UnusedPrediction, ATaskMayReachParamsThroughNestedTasks) {
  UnusedPrediction prediction(1);
  prediction.begin(kOutermost, {true});
  EXPECT_TRUE(prediction.reaches_nothing());
  prediction.record_arrival(0, kNested);
  prediction.begin({3, 0}, {true});
  EXPECT_FALSE(prediction.reaches_nothing());
}

TEST(UnusedPrediction, ANestedTaskThatReachesNothingSaysNothing) {
  UnusedPrediction prediction(1);
  prediction.begin(kNested, {true});
  EXPECT_FALSE(prediction.reaches_nothing());
}

}  // namespace
}  // namespace ddpx
